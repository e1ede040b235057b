import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from vitlab.errors import InputError
from vitlab.inference import decoder as decoder_module
from vitlab.inference.decoder import Decoder, resolve_precision
from vitlab.models.catalog import create_model

N, V = 24, 16


def tokens_of(batch, seed=1, num_pixels=N):
    return torch.randint(V, (batch, num_pixels), generator=torch.Generator().manual_seed(seed))


def decoded(decoder, tokens, given=0):
    """Give the logits of the pixels from `given` on, read one by one."""
    logits = [decoder.start(tokens[:, :given])]
    logits += [decoder.step(column) for column in tokens[:, given:-1].unbind(dim=1)]
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given", [0, 1, 7, N - 1])
def test_decoder_gives_the_networks_own_logits(random_imagegpt, bias, given):
    network = random_imagegpt(bias=bias).double()
    tokens = tokens_of(3)
    logits = network.pixel_logits(tokens)[:, given:]
    torch.testing.assert_close(decoded(Decoder(network), tokens, given), logits, rtol=0, atol=1e-10)
    assert logits.std() > 0.5
    single = network.float().pixel_logits(tokens)[:, given:]
    torch.testing.assert_close(decoded(Decoder(network), tokens, given), single, rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_decoder_keeps_all_pixels_where_its_memory_grows(random_imagegpt, precision):
    """20 x 15 pixels are three chunks; what is read at once needs no stored keys and values."""
    network = random_imagegpt(image_size=(20, 15), depth=1)
    decoder, tokens = Decoder(network, precision=precision), tokens_of(2, num_pixels=300)
    stepped = decoded(decoder, tokens)
    tolerance = {"fp32": 1e-5, "bf16": 0.06, "int8": 0.06}[precision]
    for given in (127, 128, 255, 299):
        torch.testing.assert_close(stepped[:, given], decoder.start(tokens[:, :given]), rtol=0, atol=tolerance)
    assert decoder.blocks[0].keys.shape[2] == decoder.blocks[0].values.shape[3] == 384


def test_decoder_forgets_the_images_before(random_imagegpt):
    network = random_imagegpt().double()
    decoder, tokens = Decoder(network), tokens_of(2, seed=5)
    decoded(decoder, tokens_of(4))
    assert torch.equal(decoded(decoder, tokens), decoded(Decoder(network), tokens))


def test_decoder_select_goes_on_with_the_chosen_images(random_imagegpt):
    network = random_imagegpt().double()
    decoder, tokens, rows = Decoder(network), tokens_of(3), torch.tensor([2, 0, 2, 2])
    decoder.start(tokens[:, :9])
    decoder.select(rows)
    logits = decoder.step(tokens[rows, 9])
    torch.testing.assert_close(logits, network.pixel_logits(tokens)[rows, 10], rtol=0, atol=1e-10)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("capabilities", [{"avx512_bf16": True}, {}])
def test_decoder_stores_keys_and_values_in_bf16_where_the_processor_computes_in_it(
    random_imagegpt, monkeypatch, precision, capabilities
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    decoder, tokens = Decoder(random_imagegpt(), precision=precision), tokens_of(3)
    decoded(decoder, tokens)
    expected = torch.bfloat16 if capabilities and precision != "fp32" else torch.float32
    assert {block.keys.dtype for block in decoder.blocks} == {expected}
    assert {block.values.dtype for block in decoder.blocks} == {expected}


@pytest.mark.parametrize("width", [7, 8, 13, 34, 80])
@pytest.mark.parametrize("given", [0, 9, 130, 255])
def test_decoder_sees_nothing_of_what_is_not_there_yet(random_imagegpt, monkeypatch, given, width):
    """In bf16 all places of the stored keys and values are multiplied: those without a pixel hold zeros."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    tokens = tokens_of(2, num_pixels=300)
    decoder = Decoder(random_imagegpt(image_size=(20, 15), embed_dim=2 * width, num_heads=2), precision="bf16")
    torch.use_deterministic_algorithms(mode=True)  # so that empty memory holds NaN
    try:
        decoder.start(tokens[:, :given])
        expected = decoder.step(tokens[:, given])
        decoder.start(tokens[:, :given])
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert expected.isfinite().all()
    with torch.inference_mode():
        for block in decoder.blocks:
            later = block.keys[:, :, given + 1 :], block.values[..., given + 1 :]
            assert all((places == 0).all() for places in later)
            later[0].fill_(100.0)
    assert torch.equal(decoder.step(tokens[:, given]), expected)


def test_decoder_block_attends_to_all_pixels_that_were_read(random_imagegpt, monkeypatch):
    """Beside torch's attention, on stored keys and values of which the places after the read ones are left out."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    decoder = Decoder(random_imagegpt(image_size=(20, 15)), precision="bf16")
    decoder.start(tokens_of(2, num_pixels=200))
    block, num_read = decoder.blocks[0], 201
    query = torch.ones(2, block.num_heads, 1, block.keys.shape[3], dtype=torch.bfloat16)
    with torch.inference_mode():
        block.keys[:, :, num_read - 1] = 1.0  # so that much of the weight is on the last of them
    keys, values = block.keys[:, :, :num_read].float(), block.values[..., :num_read].mT.float()
    expected = F.scaled_dot_product_attention(query.float(), keys, values, scale=1.0)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        given = block._attend(query, num_read)
    assert counter.get_total_flops() == 2 * 2 * block.keys.numel()  # of all places: a part would be copied
    torch.testing.assert_close(given.view_as(expected).float(), expected, rtol=0, atol=0.02 * expected.abs().max())
    fewer = F.scaled_dot_product_attention(query.float(), keys[:, :, :-1], values[:, :, :-1], scale=1.0)
    assert (fewer - expected).abs().max() > 0.2 * expected.abs().max()


def test_decoder_work_of_a_step_grows_with_attention_alone(random_imagegpt):
    """In multiply-adds: the matrices cost the same at every step, attention by the inputs that were read."""
    network = random_imagegpt(image_size=(20, 15)).double()
    decoder, tokens = Decoder(network), tokens_of(1, num_pixels=300)

    def flops(given):
        decoder.start(tokens[:, :given])
        with FlopCounterMode(display=False) as counter:
            decoder.step(tokens[:, given])
        return counter.get_total_flops()

    D, L = network.config.embed_dim, network.config.depth
    matrices = 2 * (12 * D * D * L + D * V)
    for given in (0, 100, 126, 127, 298):
        num_read = 1 + given + 1  # the start token, those given, the step's
        assert flops(given) == matrices + 2 * 2 * num_read * D * L


@pytest.mark.parametrize(("precision", "nats", "share"), [("bf16", 2e-4, 0.008), ("int8", 2e-3, 0.025)])
def test_decoder_precision_changes_the_next_colours_little(random_imagegpt, precision, nats, share):
    """Mean KL divergence from float32 and total-variation distance of the next colour's distributions."""
    network = random_imagegpt(embed_dim=64, depth=4, num_heads=4)
    tokens = tokens_of(32)
    exact = network.pixel_logits(tokens).double().log_softmax(dim=-1)
    rounded = decoded(Decoder(network, precision=precision), tokens).double().log_softmax(dim=-1)
    divergence = (exact.exp() * (exact - rounded)).sum(dim=-1).mean()
    distance = (exact.exp() - rounded.exp()).abs().sum(dim=-1).mean() / 2
    assert nats / 100 < divergence < nats  # that it is no less shows that the precision is in use
    assert share / 20 < distance < share


@pytest.mark.parametrize("bias", [True, False])
def test_decoder_int8_matrix_is_right_in_rows_of_any_size_and_does_not_depend_on_neighbours(bias):
    layer = torch.nn.Linear(48, 20, bias=bias)
    multiply = decoder_module._linear(layer, "int8")
    rows = torch.randn(6, 48) * torch.tensor([1e-20, 1e-3, 1.0, 30.0, 1e6, 0.0])[:, None]
    with torch.no_grad():
        exact, rounded = layer(rows), multiply(rows)
        bound = 0.02 * rows.abs().amax(dim=1, keepdim=True) + 1e-6
        assert ((rounded - exact).abs() <= bound).all()
        for i in range(len(rows)):
            assert torch.equal(multiply(rows[[i, i - 1]])[0], rounded[i])
            size = rows[i].abs().max()
            a_step = size / 127 * layer.weight.abs().max()  # an input that lies between two whole numbers
            assert ((multiply(rows[i : i + 1])[0] - rounded[i]).abs() <= a_step + 1e-6 * size + 1e-7).all()


def test_decoder_in_lower_precision_runs_where_torch_lacks_its_packed_products(random_imagegpt, monkeypatch):
    network, tokens = random_imagegpt(), tokens_of(2)
    packed = decoded(Decoder(network, precision="bf16"), tokens)
    monkeypatch.setattr(decoder_module, "has_packed_products", lambda dtype: False)
    plain = decoded(Decoder(network, precision="bf16"), tokens)
    torch.testing.assert_close(packed, plain, rtol=0, atol=0.1)
    torch.testing.assert_close(decoded(Decoder(network), tokens), network.pixel_logits(tokens), rtol=0, atol=1e-4)


def test_decoder_ignores_a_callers_autocast(random_imagegpt):
    network, tokens = random_imagegpt(), tokens_of(2)
    expected = decoded(Decoder(network), tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(decoded(Decoder(network), tokens), expected)


def test_resolve_precision_takes_what_the_device_computes_in(monkeypatch):
    cpu = torch.device("cpu")
    for capabilities, expected in (({"avx512_bf16": True}, "bf16"), ({}, "fp32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert resolve_precision("auto", cpu) == expected
        assert resolve_precision("bf16", cpu) == "bf16"
    with pytest.raises(InputError, match="precision int8 needs an x86 processor, and the device is cuda:0: use auto"):
        resolve_precision("int8", torch.device("cuda:0"))
    monkeypatch.setattr(decoder_module, "_has_int8", lambda: False)
    with pytest.raises(InputError, match="int8 needs an x86 processor"):
        resolve_precision("int8", cpu)


def test_decoder_int8_without_vnni_leaves_room_for_sums_of_16_bits(random_imagegpt, monkeypatch):
    network, tokens = random_imagegpt(), tokens_of(4)
    exact = network.pixel_logits(tokens)
    with_vnni = (decoded(Decoder(network, precision="int8"), tokens) - exact).abs().mean()
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    without = (decoded(Decoder(network, precision="int8"), tokens) - exact).abs().mean()
    assert with_vnni < without < 0.1


def test_decoder_refuses_what_cannot_draw(random_imagegpt):
    vit = create_model("vit_tiny", image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1)
    with pytest.raises(InputError, match="vit_tiny cannot draw images: give an ImageGPT"):
        Decoder(vit)
    with pytest.raises(InputError, match="imagegpt_small is not causal, it was trained on masked pixels"):
        Decoder(random_imagegpt(causal=False))
