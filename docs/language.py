"""A hook of mkdocs: tells browsers the language of Chinese pages, so that they pick the right fonts."""


def on_post_page(output: str, page, config) -> str:
    """Return the page with its own language in `<html lang>`."""
    if ".zh-CN." in page.file.src_uri:
        return output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return output
