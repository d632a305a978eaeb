"""Chat templates in the styles of well-known families, and with constructs that no family uses."""

from folders import REPO, table

LONG = (REPO / "benchmarks" / "long_template.jinja").read_text()
TEMPLATES = table("inputs/chat_templates.yaml")
LONG_STYLES = {"long": LONG, **TEMPLATES["styles"]}
OPAQUE, UNUSUAL = TEMPLATES["opaque"], TEMPLATES["unusual"]


def looped(templates):
    """Return templates with LOOP and END as a loop over all turns m."""
    return {
        name: text.replace("LOOP", "{% for m in messages %}").replace("END", "{% endfor %}")
        for name, text in templates.items()
    }
