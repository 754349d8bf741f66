"""What is said of a result, and of two beside each other."""

import json

import pytest
import report
import scaling
import throughput

SETTINGS = dict.fromkeys(("workload", "step", "batch_size", "steps", "repeats", "sync_every_step"), 50)


def fake_row(name, *raw, **more):
    figure = {"median": sorted(raw)[len(raw) // 2], "low": min(raw), "high": max(raw), "raw": list(raw)}
    whole = {"below_bound": False, "wrong_repeats": []}
    return {"name": name, "ms_per_step": figure, "ours": name.startswith("gpuprefetch"), **whole, **more}


def test_who_is_faster_is_said():
    ours, plain = fake_row("gpuprefetch", 10, 11, 12), fake_row("dataloader", 30, 33, 34)
    assert report._verdict([plain, ours]) == [
        "gpuprefetch: 11.0 ms a step, 3.00x as fast as dataloader (33.0)",
        "",
    ]
    assert report._verdict([plain, ours, fake_row("spdl8", 9, 10.5, 12), fake_row("nodes8", 5, 6, 7)])[1] == (
        "ahead of gpuprefetch: nodes8 6.0, spdl8 10.5 (within the spread)"
    )


def test_multiples_of_one():
    made = [
        fake_row("dataloader", 80.0, 100.0, 90.0),
        fake_row("gpuprefetch", 60.0, 60.0, 60.0),
        fake_row("gpuprefetch0", 70.0, 70.0, 70.0),
        fake_row("gpuprefetch4", 20.0, 15.0, 30.0),
        fake_row("workers4", 40.0, 20.0, 30.0),
        fake_row("workers15", 8.0, 10.0, 10.0),
        fake_row("nodes1", 50.0, 50.0, 50.0),
        fake_row("nodes4", 25.0, 25.0, 25.0),
    ]
    multiples = scaling.multiples_of_one(made)
    assert [(each["name"], each["of"], each["raw"]) for each in multiples] == [
        ("gpuprefetch4", "gpuprefetch", [3.0, 4.0, 2.0]),
        ("workers4", "dataloader", [2.0, 5.0, 3.0]),
        ("workers15", "dataloader", [10.0, 10.0, 9.0]),
        ("nodes4", "nodes1", [2.0, 2.0, 2.0]),
    ]
    assert [line.split() for line in report._multiples(multiples)] == [
        ["threads", "or", "processes", "4", "15"],
        ["gpuprefetchN", "3.00", "-", "times", "gpuprefetch"],
        ["workersN", "3.00", "10.00", "times", "dataloader"],
        ["nodesN", "2.00", "-", "times", "nodes1"],
        [],
    ]
    assert scaling.multiples_of_one([fake_row("workers4", 1.0), fake_row("thread", 2.0)]) == []


def test_what_a_step_takes_over_that_with_processes():
    made = [
        fake_row("dataloader", 80.0, 100.0, 90.0),
        fake_row("gpuprefetch", 60.0, 50.0, 40.0),
        fake_row("gpuprefetch8-nice", 22.0, 10.0, 30.0),
        fake_row("workers4", 40.0, 20.0, 10.0),
        fake_row("workers8", 20.0, 10.0, 40.0),
        fake_row("nodes8", 25.0, 25.0, 25.0),
    ]
    over = scaling.over_processes(made)
    assert [(each["name"], each["of"], each["raw"]) for each in over] == [
        ("gpuprefetch", "workers4", [1.5, 2.5, 4.0]),
        ("gpuprefetch", "workers8", [3.0, 5.0, 1.0]),
        ("gpuprefetch8-nice", "workers4", [0.55, 0.5, 3.0]),
        ("gpuprefetch8-nice", "workers8", [1.1, 1.0, 0.75]),
    ]
    assert [line.split() for line in report._over_processes(over)] == [
        ["ms", "a", "step", "over", "those", "of", "workers4", "workers8"],
        ["gpuprefetch", "2.50", "3.00"],
        ["gpuprefetch8-nice", "0.55", "1.00"],
        [],
    ]
    assert scaling.over_processes(made[:3]) == [] and report._over_processes([]) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ('{"benchmark": "handover"}', "is no result of this"),
        ("[]", "is no result of this"),
        (f'{{"benchmark": "throughput", "format": {throughput.FORMAT}}}', "is no result of this"),
    ],
)
def test_what_can_t_be_compared(text, said, tmp_path, capsys):
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    assert throughput.main(throughput.parse_arguments(["--compare", str(file), str(file)])) == 1
    assert said in capsys.readouterr().err


def test_two_results_side_by_side(tmp_path, capsys):
    files = []
    for name, step, version in (("a.json", 10, "2.11"), ("b.json", 20, "2.12")):
        made = [fake_row("gpuprefetch", step, step + 1, step + 2), fake_row(name, 1, 2, 3), fake_row("thread", 7, 8, 9)]
        files.append(tmp_path / name)
        files[-1].write_text(
            json.dumps(
                {
                    "benchmark": "throughput",
                    "format": throughput.FORMAT,
                    "settings": SETTINGS,
                    "environment": {"torch": version},
                    "rows": made,
                }
            )
        )
    assert throughput.main(throughput.parse_arguments(["--compare", *map(str, files)])) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"first: {files[0]}\nsecond: {files[1]}\n")
    assert "torch: 2.11  ->  2.12" in said and said.count("->") == 1
    assert [line.split()[-2:] for line in said.splitlines() if line.startswith("gpuprefetch")] == [["1.909", "apart"]]
    assert [line.split()[-1] for line in said.splitlines() if line.startswith("thread")] == ["spread"]
    assert "only in one of them: a.json, b.json" in said


def test_a_comparison_marks_what_not_to_trust():
    def result(**marks):
        return {"settings": SETTINGS, "environment": {}, "rows": [fake_row("thread", 1, 2, 3, **marks)]}

    said = report.comparison(result(below_bound=True), result(wrong_repeats=[1]))
    assert [line.split()[1] for line in said.splitlines() if line.startswith("thread")] == ["2.00*"]
    assert " 2.00! " in said and "*: more than 2 %" in said and "!: gave other batches" in said
    whole = report.comparison(result(), result())
    assert "*" not in whole and "!" not in whole


def test_results_that_can_hardly_be_compared(tmp_path):
    def result(repeats, **settings):
        made = [fake_row("thread", *[1] * repeats)]
        return {"settings": SETTINGS | settings, "environment": {}, "rows": made}

    said = report.comparison(result(1), result(1, batch_size=64, commit="abc"))
    assert "note: they did different work" in said
    assert "commit: None  ->  abc" in said
    assert [line.split()[-2:] for line in said.splitlines() if line.startswith("thread")] == [["one", "repeat"]]
    assert "note" not in report.comparison(result(3), result(3))
