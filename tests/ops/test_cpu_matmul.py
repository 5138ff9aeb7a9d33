"""Products by oneDNN: the numbers of PyTorch's own, to rounding, wherever products come from."""

import multiprocessing
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from verl.ops import cpu_matmul
from verl.ops.cpu_matmul import active_library, chosen_library, packed_weights, use_library

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
ROUNDING = 3e-6  # of the largest value


@pytest.fixture(autouse=True)
def onednn():
    use_library("onednn")
    yield
    use_library("mkl")


def products(work):
    """How many products oneDNN computes in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return sum(event.name == "mkldnn::_linear_pointwise" for event in profile.events())


def matrix(rows, columns, seed=0, transposed=False):
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, rows) if transposed else (rows, columns)
    x = torch.randn(shape, generator=generator)
    return x.t() if transposed else x


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= ROUNDING * float(expected.abs().max())


@pytest.mark.parametrize("shape", [(8, 768, 768), (256, 256, 1024), (1000, 96, 130), (2048, 64, 48), (1, 2048, 4096)])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_products_equal_those_in_float64(shape, a_transposed, b_transposed):
    rows, inner, columns = shape
    a, b = matrix(rows, inner, 1, a_transposed), matrix(inner, columns, 2, b_transposed)
    bias = matrix(1, columns, 3)[0]
    assert_close(a @ b, a.double() @ b.double())
    assert_close(torch.addmm(bias, a, b), a.double() @ b.double() + bias)
    assert products(lambda: (a @ b, torch.addmm(bias, a, b))) == 2


LEFT_ALONE = {
    "small": lambda: (matrix(64, 64), matrix(64, 64)),
    "float64": lambda: (matrix(300, 300).double(), matrix(300, 300).double()),
    "bfloat16": lambda: (matrix(300, 300).bfloat16(), matrix(300, 300).bfloat16()),
    "overlapping rows": lambda: (matrix(1, 900).as_strided((600, 300), (1, 1)), matrix(300, 300)),
    "expanded": lambda: (matrix(1, 300).expand(600, 300), matrix(300, 300)),
    "every second column": lambda: (matrix(300, 600)[:, ::2], matrix(300, 300)),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_other_products_stay_with_pytorch_and_are_the_same_bits(case):
    a, b = LEFT_ALONE[case]()
    found = a @ b
    use_library("mkl")
    assert torch.equal(found, a @ b)
    use_library("onednn")
    assert products(lambda: a @ b) == 0


def test_wrong_shapes_and_types_are_pytorchs_errors():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        matrix(300, 200) @ matrix(300, 200)
    with pytest.raises(RuntimeError, match="dtype"):
        matrix(300, 300) @ matrix(300, 300).double()


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_and_its_gradients_equal_those_in_float64(bias):
    layer, x = nn.Linear(256, 512, bias=bias), matrix(3 * 100, 256).view(3, 100, 256).requires_grad_()
    upstream = matrix(3 * 100, 512, 7).view(3, 100, 512)
    layer(x).backward(upstream)
    g, w = upstream.double().flatten(0, 1), layer.weight.detach().double()
    assert_close(x.grad.flatten(0, 1), g @ w)
    assert_close(layer.weight.grad, g.t() @ x.detach().double().flatten(0, 1))
    assert products(lambda: layer(x).backward(upstream)) == 3


def test_scaled_sums_stay_exact():
    a, b, c = matrix(300, 300, 1), matrix(300, 300, 2), matrix(300, 300, 3)
    assert_close(torch.addmm(c, a, b, beta=0.5, alpha=2), 0.5 * c.double() + 2 * a.double() @ b.double())
    assert_close(torch.baddbmm(c[None], a[None], b[None])[0], c.double() + a.double() @ b.double())


def test_packed_weights_give_the_same_bits_and_are_forgotten_afterwards():
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(matrix(512, 1024, 5))
    x = matrix(64, 512)
    with torch.no_grad():
        plain = model[:2](x)
        with packed_weights(model):
            assert torch.equal(model[:2](x), plain)
            assert products(lambda: model[:2](x[:3])) == 2  # too few rows for weights that are not packed
            assert_close(model[:2](x[:3]), plain[:3].double())
        assert not cpu_matmul._packed


@pytest.mark.skipif(not cpu_matmul.packs(torch.bfloat16, "mkl"), reason="this processor has no products of bfloat16")
@pytest.mark.parametrize("library", ["mkl", "onednn"])
def test_weights_in_bfloat16_are_packed_whatever_computes_float32(library):
    use_library(library)
    model, x = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False)).bfloat16(), matrix(64, 512)
    with torch.no_grad():
        plain = model(x.bfloat16())
        with packed_weights(model):
            torch.testing.assert_close(model(x.bfloat16()), plain)
            assert products(lambda: model(x.bfloat16())) == 2
            wide = nn.Linear(512, 1024)
            assert products(lambda: wide(x)) == (library == "onednn")
        assert products(lambda: model(x.bfloat16())) == 0
    assert active_library() == library


def test_weights_that_change_after_the_rollout_are_read_anew():
    layer, x = nn.Linear(512, 1024, bias=False), matrix(64, 512)
    with torch.no_grad():
        with packed_weights(layer):
            before = layer(x)
        layer.weight.mul_(2)
        assert_close(layer(x), 2 * before.double())
        with packed_weights(layer):
            assert_close(layer(x), 2 * before.double())


def test_tied_weights_are_packed_once_and_nested_uses_keep_them():
    first, second = nn.Linear(512, 1024, bias=False), nn.Linear(512, 1024, bias=False)
    second.weight = first.weight
    model = nn.ModuleList([first, second])
    with packed_weights(model):
        assert len(cpu_matmul._packed) == 1
        with packed_weights(first):
            pass
        assert len(cpu_matmul._packed) == 1


def test_threads_compute_the_same_bits():
    a, b = matrix(256, 256, 1), matrix(256, 1024, 2)
    expected, found = a @ b, [None] * 4

    def work(i):
        found[i] = all(torch.equal(a @ b, expected) for _ in range(20))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def _in_child(queue):
    torch.set_num_threads(1)  # a forked process hangs in products of several threads, whichever library computes them
    queue.put((active_library(), float((torch.ones(256, 256) @ torch.ones(256, 1024)).sum())))


@pytest.mark.parametrize(
    ("method", "library"), [("fork", "onednn"), pytest.param("spawn", "mkl", marks=pytest.mark.exhaustive)]
)
def test_a_forked_process_goes_on_with_it_and_a_spawned_one_starts_with_pytorchs(method, library):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == (library, 256 * 256 * 1024)
    child.join(60)


def test_transforms_autocast_and_inference_mode_work():
    a, b = matrix(256, 256, 1), matrix(256, 512, 2)
    expected = a.double() @ b.double()
    with torch.inference_mode():
        assert_close(a @ b, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ b).dtype is torch.bfloat16
    assert_close(torch.func.vmap(torch.mm)(a[None], b[None])[0], expected)
    assert_close(torch.func.grad(lambda x: (x @ b).sum())(a), torch.ones_like(expected) @ b.double().t())
    with torch.device("meta"):
        assert (torch.empty(256, 256) @ torch.empty(256, 512)).shape == (256, 512)


@pytest.mark.exhaustive
def test_compiled_code_computes_the_same():
    a, b = matrix(256, 256, 1), matrix(256, 512, 2)
    assert_close(torch.compile(lambda x, y: F.relu(x @ y))(a, b), (a.double() @ b.double()).relu())


def test_the_library_is_chosen_by_the_processor_and_named_settings_hold():
    assert chosen_library("mkl") == "mkl"
    assert chosen_library("onednn") == "onednn"
    assert chosen_library("auto") == chosen_library("auto")
    use_library("mkl")
    assert active_library() == "mkl"
    use_library("mkl")
    use_library("onednn")
    use_library("onednn")
    assert active_library() == "onednn"
