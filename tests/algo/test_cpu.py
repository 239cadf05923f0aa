"""Products by oneDNN against float64, at the edges of its blocks; the same functions where oneDNN is not used."""

import time

import pytest
import torch
import transformers
from torch import nn

from exgrpo_cli.algo import cpu as products

ROWS = [1, products.FEWEST_ROWS - 1, products.FEWEST_ROWS, products.FEWEST_ROWS + 1, 2500]
ROWS += [most + over for most, _ in products.PADDED_ROWS[:-1] for over in (0, 1)]


@pytest.fixture(params=["onednn", "plain"])
def backend(request, monkeypatch):
    # oneDNN computes the same on any processor; a measurement decides only whether it pays.
    monkeypatch.setattr(products, "onednn_pays", lambda: request.param == "onednn")
    monkeypatch.setattr(products, "FEWEST_OPERATIONS", 0)
    return request.param


def gap(result, expected):
    """Largest error relative to the largest entry."""
    return float((result.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("num_rows", ROWS)
def test_product_and_its_transpose_are_those_of_float64(backend, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    left = torch.randn(num_rows, 48, generator=generator)
    right = torch.randn(40, 48, generator=generator)
    bias = torch.randn(40, generator=generator)
    grads = torch.randn(num_rows, 40, generator=generator)

    assert gap(products.matmul(left, right, bias), left.double() @ right.double().t() + bias.double()) < 1e-5
    assert gap(products.matmul(grads, right.t()), grads.double() @ right.double()) < 1e-5
    assert gap(products.transposed_matmul(grads, left), grads.double().t() @ left.double()) < 1e-5


@pytest.mark.parametrize("shape", [(1500, 48), (3, 500, 48)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_of_linear_are_those_of_float64(backend, shape, with_bias):
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator), torch.randn(40, 48, generator=generator)]
    tensors += [torch.randn(40, generator=generator)] if with_bias else []
    weights = torch.randn(*shape[:-1], 40, generator=generator)
    single = [tensor.clone().requires_grad_() for tensor in tensors]
    double = [tensor.double().requires_grad_() for tensor in tensors]

    (products.linear(*single) * weights).sum().backward()
    (nn.functional.linear(*double) * weights.double()).sum().backward()

    for ours, reference in zip(single, double, strict=True):
        assert gap(ours.grad, reference.grad) < 1e-5


@pytest.mark.parametrize("with_bias", [True, False])
def test_rounded_factors_and_their_gradients(with_bias):
    """Each product against float64 from the factors that bfloat16 rounds to, but for one rounding of its sum."""
    generator = torch.Generator().manual_seed(1)
    inputs, grads = torch.randn(3, 50, 48, generator=generator), torch.randn(3, 50, 40, generator=generator)
    layer = nn.Linear(48, 40, bias=with_bias)
    layer.__class__ = products.RoundedLinear
    inputs.requires_grad_()
    outputs = layer(inputs)
    outputs.backward(grads)
    x, w, g = (each.detach().bfloat16().double().flatten(0, -2) for each in (inputs, layer.weight[None], grads))
    expected = x @ w.t() + (layer.bias.double() if with_bias else 0)
    found = [(outputs, expected), (inputs.grad, g @ w), (layer.weight.grad, g.t() @ x)]
    for ours, reference in found:
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double().view(reference.shape), reference, rtol=2**-8, atol=2**-8)
    assert not with_bias or gap(layer.bias.grad, grads.double().sum(dim=(0, 1))) < 1e-5


def test_a_row_gives_the_same_result_wherever_it_stands_in_its_block(backend):
    rows = torch.randn(2048, 48, generator=torch.Generator().manual_seed(2))
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(4))

    torch.testing.assert_close(
        products.matmul(rows[order], weight), products.matmul(rows, weight)[order], rtol=0, atol=1e-5
    )


def test_other_dtypes_keep_torch_own_product(backend):
    left, right = torch.randn(200, 48, dtype=torch.float64), torch.randn(40, 48, dtype=torch.float64)

    assert torch.equal(products.matmul(left, right), nn.functional.linear(left, right))


def test_narrow_factors_have_wide_sums_on_a_gpu():
    """By torch's own operation, without a kernel on the meta device; on a CPU a product is widened afterwards."""
    left, right = torch.randn(200, 48, dtype=torch.bfloat16), torch.randn(40, 48, dtype=torch.bfloat16)
    here = products.wide_matmul(left, right, torch.float32)
    assert here.dtype == torch.float32 and torch.equal(here, products.matmul(left, right).float())
    there = products.wide_matmul(left.to("meta"), right.to("meta"), torch.float32)
    assert (there.dtype, there.shape) == (torch.float32, (200, 40))
    assert products.wide_matmul(left.double(), right.double(), torch.float64).dtype == torch.float64


@pytest.mark.parametrize(("slower", "pays"), [("linear", True), ("_onednn", False)])
def test_the_faster_library_is_measured_once_and_kept(slower, pays, monkeypatch, tmp_path):
    """One of the two takes 5 ms more for each product, by one thread; asked again, no product is made."""
    monkeypatch.setenv("EXGRPO_CACHE", str(tmp_path))
    threads = torch.get_num_threads()
    where = products.F if slower == "linear" else products
    plain, calls = getattr(where, slower), []

    def waiting(*tensors):
        calls.append(tensors)
        assert torch.get_num_threads() == 1
        until = time.process_time() + 0.005
        while time.process_time() < until:
            pass
        return plain(*tensors)

    monkeypatch.setattr(where, slower, waiting)
    # Nothing that measures may ask what has been measured.
    asked = products.onednn_pays.__wrapped__
    monkeypatch.setattr(products, "onednn_pays", None)
    torch.set_num_threads(2)
    assert asked() is pays and calls
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    calls.clear()
    assert asked() is pays and not calls
    # A cache folder that cannot be written: measured again.
    monkeypatch.setenv("EXGRPO_CACHE", "/proc/nowhere")
    assert asked() is pays and calls


@pytest.mark.parametrize("name", ["Qwen2", "Llama"])
@pytest.mark.parametrize("pays", [True, False])
def test_plain_linear_layers_of_the_published_backbones_change_where_it_pays(name, pays, monkeypatch):
    """Seven matrices and the head, with names and results; a subclass of one's own keeps its way."""
    monkeypatch.setattr(products, "onednn_pays", lambda: pays)

    class Scaled(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = getattr(transformers, f"{name}Config")(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.model.layers[0].mlp.up_proj.__class__ = Scaled
    names, ids = list(model.state_dict()), torch.arange(8)[None]
    before = model(input_ids=ids).logits

    products.use_fast_matmuls(model)

    kinds = [type(layer) for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert sorted(map(str, kinds)) == sorted(map(str, 7 * [products.FastLinear if pays else nn.Linear] + [Scaled]))
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(input_ids=ids).logits, before)
    assert not torch.backends.mkldnn.is_available() or hasattr(torch.ops.mkldnn, "_linear_pointwise")
