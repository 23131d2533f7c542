"""Private packages of torch are used in one place, and what is used there is as ChunkFlow expects it.

make test-stand-in runs this file, too, on another release of torch.
"""

from __future__ import annotations

import ast
import re
import threading

import pytest
import torch
from conftest import HERE
from torch._subclasses.fake_tensor import FakeTensorMode

from chunkflow_compile.private_torch import core, dynamo, inductor

ROOT = HERE.parent
PRIVATE = ("torch._dynamo", "torch._inductor", "torch._C")
HOME = ROOT / "chunkflow_compile" / "private_torch"


def named(source: str) -> list[str]:
    """The private packages that a module imports or refers to in its code."""
    found = []
    mentions = any(re.search(rf"\b{package.rpartition('.')[2]}\b", source) for package in PRIVATE)
    for node in ast.walk(ast.parse(source)) if mentions else ():
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        found += [package for package in PRIVATE for name in names if f"{name}.".startswith(f"{package}.")]
    return found


def test_what_is_found() -> None:
    assert named("import torch._C\nfrom torch import _dynamo\nfrom torch._inductor.exc import E") == [
        "torch._C",
        "torch._dynamo",
        "torch._inductor",
    ]
    assert named("torch._C._f()\ntorch._Called\n'torch._dynamo'") == ["torch._C", "torch._C"]


def test_only_private_torch_imports_them() -> None:
    paths = [path for package in ("chunkflow_compile", "passes") for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): named(path.read_text()) for path in paths if HOME not in path.parents}
    assert not {path: packages for path, packages in found.items() if packages}
    assert {package for path in HOME.glob("*.py") for package in named(path.read_text())} == set(PRIVATE)


@pytest.mark.parametrize("module", [dynamo, inductor], ids=["dynamo", "inductor"])
def test_each_name_is_documented(module: object) -> None:
    own = {"backend_of", "source_name"}  # with docstrings of their own
    assert [name for name in module.__all__ if name not in own and f"``{name}``" not in module.__doc__] == []


def test_dynamo() -> None:
    torch._dynamo.reset()
    frames, ended = [], []

    def ends(*_: object) -> None:
        ended.append(dynamo.compile_lock.acquire(blocking=False))  # of this thread, so that it can be entered again
        dynamo.compile_lock.release()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        frames.append(dynamo.InstructionTranslator.current_tx().output.compiler_fn)
        taken: list[bool] = []
        other = threading.Thread(target=lambda: taken.append(dynamo.compile_lock.acquire(blocking=False)))
        other.start()
        other.join()
        assert taken == [False], "another thread compiles meanwhile"
        with dynamo.dynamo_timed("chunkflow_expected"):
            return graph.forward

    module = torch.nn.Linear(2, 2)
    kept = list(dynamo.callback_handler.end_callbacks)
    dynamo.callback_handler.register_end_callback(ends)
    try:
        with dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1, skip_nnmodule_hook_guards=False):
            compiled = torch.compile(module, backend=backend)
            assert isinstance(compiled, dynamo.OptimizedModule)
            assert compiled._orig_mod is module
            assert torch.equal(compiled(torch.ones(1, 2)), module(torch.ones(1, 2)))
    finally:
        dynamo.callback_handler.end_callbacks = kept
    assert len(frames) == 1
    assert ended == [True]
    assert dynamo.compilation_time_metrics["chunkflow_expected"]
    assert dynamo.backend_of(torch.compile(module.forward, backend=backend)) is backend
    assert dynamo.backend_of(module.forward) is None


def test_inductor() -> None:
    names = inductor.config.get_config_copy()
    assert {"triton.cudagraphs", "freezing", "keep_output_stride"} <= names.keys()
    assert "max-autotune" in inductor.list_mode_options()
    assert str(inductor.cpu_vec_isa.pick_vec_isa())
    assert torch.ops.aten.silu.default in inductor.select_decomp_table()
    assert issubclass(inductor.CppCompileError, Exception)
    assert issubclass(inductor.InductorError, RuntimeError)
    assert issubclass(inductor.SubprocException, Exception)
    assert isinstance(inductor.PyCodeCache.modules, list)


def test_core() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    core.swap_values(a, b)
    assert a.tolist() == [0, 0]
    before = core.storage_uses(a)
    view = a[:1]
    assert core.storage_uses(a) == before + 1
    assert core.fake_mode() is None
    with FakeTensorMode() as mode:
        assert core.fake_mode() is mode
        assert core.dispatch_modes() == 1
    assert core.dispatch_modes() == 0
    with core.view_tracking(False):
        assert not a[:1]._is_view()
    with torch.inference_mode(), torch.inference_mode(False), core.view_tracking(True):
        assert a[:1]._is_view()
    assert view._is_view()
    assert not core.autocasts()
    with torch.autocast("cpu"):
        assert core.autocasts()
    with core.unprofiled():
        a.add_(1)
    with core.DisableTorchFunctionSubclass():
        assert core.disabled_torch_function(torch.neg, (), (a,)).tolist() == [-1, -1]


def test_a_tensor_without_memory_refuses_its_pointer() -> None:
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function: object, *_: object) -> object:
            raise NotImplementedError(function)

    empty = torch.Tensor._make_wrapper_subclass(Empty, (2,))
    assert empty.data_ptr() == 0
    core.forbid_data_pointer(empty)
    with pytest.raises(RuntimeError):
        empty.data_ptr()


def test_the_work_of_a_future() -> None:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    work = core.work_of(future)
    assert not work.is_completed()
    future.set_result([torch.ones(1)])
    work.wait()
    assert work.is_completed()
