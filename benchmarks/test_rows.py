"""Which rows run, what their bounds are, and which cells there are."""

import gc
import multiprocessing

import cells
import pytest
import rows
import throughput
import torch
from parts import Parts
from target import Target
from workloads import make_loader, make_workload


def names_of(arguments):
    return [row.name for row in throughput.parse_arguments(arguments.split()).rows]


def numbered(name, *counts):
    return [f"{name}{count}" for count in counts]


def test_which_rows_run():
    assert names_of("") == ["dataloader", "pinned", "thread", "gpuprefetch", "gpuprefetch0"]
    assert names_of("--loaders thread,apex,thread") == ["thread", "apex"]
    assert names_of("--loaders all")[-11:] == [
        *numbered("gpuprefetch", 4, 8),
        *numbered("gpuprefetch-workers", 4, 8),
        *numbered("workers", 4, 8),
        "timm",
        *numbered("nodes", 4, 8),
        *numbered("spdl", 4, 8),
    ]
    for wrong in ("thread,worker", ",", "workers", "workers0", "gpuprefetch257", "timm4", "all,thread"):
        with pytest.raises(SystemExit):
            names_of(f"--loaders {wrong}")


def test_which_rows_run_with_which_threads():
    assert names_of("--loaders gpuprefetch15,workers3,gpuprefetch0") == ["gpuprefetch15", "workers3", "gpuprefetch0"]
    assert names_of("--loaders gpuprefetch1,gpuprefetch") == ["gpuprefetch"]
    assert names_of("--threads 1") == ["dataloader", "gpuprefetch"]
    assert names_of("--threads 15,1,2,2") == [
        "dataloader",
        "gpuprefetch",
        *numbered("gpuprefetch", 2, 15),
        *numbered("workers", 2, 15),
    ]
    assert names_of("--loaders nodesN,workersN,workers2 --threads 1,2") == [
        *numbered("nodes", 1, 2),
        *numbered("workers", 1, 2),
    ]
    everything = names_of("--loaders all --threads 1,2")
    assert everything[:12] == [
        *("dataloader", "pinned", "windows-fix", "apex", "background", "fastreid", "thread"),
        *("gpuprefetch", "gpuprefetch0", "gpuprefetch-x", "gpuprefetch2", "gpuprefetch-workers1"),
    ]
    assert everything[12:15] == ["gpuprefetch-workers2", "workers1", "workers2"]
    assert everything[15:] == ["timm", *numbered("nodes", 1, 2), *numbered("spdl", 1, 2)]


def test_a_numbered_row_is_made_for_its_number(target):
    loader = make_loader(make_workload("memory", 8, 0, None), 4, 50)
    (row,) = rows.rows_called("gpuprefetch3", [])
    assert row.is_ours and row.loads_beside and not row.default
    assert row.description == "PrefetchIterator(loader, num_threads=3), samples on 3 threads"
    assert row.bound.formula == "max(fetch / 3, stage, copy, compute)"
    with row.make(loader, target, 2) as source:
        assert "num_threads=3" in repr(source)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_the_processes_of_a_row_end_with_it(device):
    gc.collect()  # a forked worker that collects what other tests left aborts at a tensor on the device
    others = set(multiprocessing.active_children())
    (row,) = rows.rows_called("workers2", [])
    loader = make_loader(make_workload("memory", 8, 0, None), 4, 50)
    with row.make(loader, Target(torch.device(device)), 2) as source:
        batches = iter(source)
        next(batches)
        del batches
        assert len(set(multiprocessing.active_children()) - others) == 2  # for the next epoch
    assert not set(multiprocessing.active_children()) - others  # though `source` still refers to the row


def test_every_cell_is_a_command():
    made = cells.cells()
    assert len(made) == 29
    for name, arguments in made.items():
        options = throughput.parse_arguments(arguments)
        assert options.sync_every_step == name.endswith("-sync")
        if name.startswith("threads-"):
            assert name == f"threads-{options.decoder}-{options.step.replace('none', 'loading')}"
            assert options.rows[-1].name == "workers15"
        elif name.startswith("4-cores-"):
            assert name == f"4-cores-{options.workload}"
            assert cells.command_of(name)[:3] == ["taskset", "-c", "0-3"]
        elif name.startswith("earlier-"):
            assert name.removesuffix("-sync") == f"earlier-{options.workload}" and options.step == "resnet50"
        else:
            assert name.startswith(f"{options.workload}-{options.step}")
            assert {row.name.rstrip("48") for row in options.rows} == {
                row.rstrip("48") for row in names_of("--loaders all")
            }


def test_cells_are_called_by_name_or_by_how_they_begin():
    assert cells.cells_called("jpeg-kernels") == ["jpeg-kernels"]
    assert cells.cells_called("threads-pil") == ["threads-pil-loading", "threads-pil-resnet50-graph"]
    assert len(cells.cells_called("threads")) == 10
    assert cells.cells_called("thread") == []


@pytest.mark.parametrize(("rested", "step"), [(3.0, 3.0), (6.0, 5.0)])
def test_a_device_that_is_faster_after_a_rest_lowers_the_bound_where_it_rests(rested, step):
    parts = Parts(load=8.0, fetch=7.0, stage=1.0, copy=1.0, compute=5.0, rested=rested)
    bounds = {name: rows.ROWS[name].bound_for(True).seconds(parts) for name in ("pinned", "gpuprefetch0", "thread")}
    assert bounds == {"pinned": 9.0 + step, "gpuprefetch0": 7.0 + step, "thread": 9.0}
    assert rows.ROWS["pinned"].bound_for(False).seconds(parts) == 9.0
