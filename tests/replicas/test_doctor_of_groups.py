"""`doctor` measures between groups that are started at the same lighthouse."""

from concurrent.futures import ThreadPoolExecutor

import inject
from replica_groups import lighthouse
from world import World, lines_of

QUICKLY = inject.together(
    inject.setting("collective_sizes", (2**10, 2**20)), inject.setting("measure_seconds", 0.01)
)


def doctor(pool, *words):
    """Run `doctor` on a rank of a pool; return its findings."""
    usual = "doctor.format=json doctor.file_mib=1"
    results = pool.command("doctor", usual, *words, seam=QUICKLY)
    return lines_of(results[0].out)


def test_doctors_of_two_groups_measure_the_link_between_them(world, tmp_path):
    second = World()
    with lighthouse() as address, ThreadPoolExecutor(1) as thread:
        words = f"run.root={tmp_path} replicas.method=sync replicas.lighthouse={address}"
        other = thread.submit(doctor, second, words, "replicas.id=1")
        both = [doctor(world, words, "replicas.id=0"), other.result()]
    second.close()
    for i, findings in enumerate(both):
        met = next(f for f in findings if f["what"] == "groups")
        assert met["text"] == f"2 met at {address}; this is {i}"
        assert [f["what"] for f in findings].count("sum over groups") == 2
        links = next(f for f in findings if f["what"] == "links between groups")
        assert links["mark"] == "ok"
        assert "plan.groups_gbps=" in links["advice"]


def test_doctor_says_how_to_measure_between_groups(world, tmp_path):
    words = f"run.root={tmp_path} replicas.method=sync launch.groups=2"
    findings = doctor(world, words)
    (met,) = [f for f in findings if f["what"] == "groups"]
    assert met["mark"] == "note"
    assert "replicas.lighthouse" in met["advice"]
