"""The drafter: its forward pass against the library, against serving written out, and where its weights come from."""

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from torch.nn.attention.flex_attention import create_mask

from drafter import contracts
from drafter.config import Target
from drafter.errors import ConfigError, ContractError
from drafter.extract.states import read_states
from drafter.target import eagle3_folder
from drafter.target.head import Verifier, read_last_layer, read_verifier
from drafter.train import attention, draft_model, examples, losses, new_drafter
from drafter.train.attention import Documents
from tests import captured, tiny_models

STEPS = 3
GROUPS = ("layer", "fc", "norms", "lm_head")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tiny_models.make_tiny_mla(tmp_path_factory.mktemp("target"))
    return Target(model=folder, served_name="tiny", layer_ids=captured.LAYER_IDS, max_seq_len=64)


@pytest.fixture(scope="module")
def warm_start(target, tmp_path_factory):
    return tiny_models.make_drafter(target.model, tmp_path_factory.mktemp("drafter"))


@pytest.fixture
def verifier(target):
    return read_verifier(target.model)


@pytest.fixture
def drafter(target, warm_start, verifier):
    model = draft_model.build_drafter(*eagle3_folder.read_drafter(warm_start), verifier, target)
    model.prepare(verifier, torch.float32, STEPS)
    draft_model.freeze_all_but(model, GROUPS)
    return model


def read(folder, *specs):
    """Examples and a function from examples to a pack."""
    entries = [captured.write_row(folder, i, tokens, spans) for i, (tokens, spans) in enumerate(specs)]
    rows = examples.learnable_rows(entries, 64, STEPS, contracts.Counts(total=len(entries)))
    return rows, examples.Reader(folder, *captured.FORM, STEPS, think_end=None, pin=False).read


def losses_per_step(drafter, pack):
    _, sums = drafter(pack, torch.ones(STEPS))
    count, loss = sums.sum(0)[:, :2].T
    return loss / count, count


# The forward pass


def test_the_losses_are_the_librarys(drafter, verifier, tmp_path):
    """On a row without a prompt both ask at the same places (but for the guess past the end): equal, step by step."""
    rows, reader = read(tmp_path, (30, [[1, 30]]))
    ours, count = losses_per_step(drafter, reader(rows))
    assert count.tolist() == [28, 27, 26]

    row = read_states(tmp_path / rows[0].entry.path)
    mask = torch.zeros(1, 29, dtype=torch.bool)
    mask[0, :28] = True
    drafter._attn_impl = drafter.config.transformer_layer_config._attn_implementation = "sdpa"
    drafter._create_mask_fn = create_mask
    drafter.verifier_norm.variance_epsilon = verifier.eps  # the library norms the teacher with the drafter's own
    _, _, metrics = Eagle3DraftModel.forward(
        drafter,
        row.aux[:-1].flatten(1)[None].float(),
        row.token_ids[None, 1:],
        torch.zeros(1, 29, dtype=torch.long),
        mask,
        torch.arange(1, 30)[None],
        row.final[None, 1:].float(),
        ttt_steps=STEPS,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    theirs = torch.stack([metrics[f"loss_{k}_sum"] for k in range(STEPS)])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def serve(weights, settings, verifier, row, anchor):
    """Draft logits of the steps from one anchor, computed the way an engine does: a cache, one slot at a time."""

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + settings["rms_norm_eps"]) * weights[name]

    heads, kv_heads, dim = settings["num_attention_heads"], settings["num_key_value_heads"], settings["head_dim"]
    frequency = settings["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)

    def rope(x, position):
        angle = torch.cat([position * frequency] * 2)
        half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * angle.cos() + half * angle.sin()

    keys, values, logits = [], [], []

    def slot(token, hidden, position):
        """Run one slot, add it to the cache, return its state before the norm."""
        x = torch.cat([norm(verifier.embed[token].float(), "midlayer.input_layernorm.weight"),
                       norm(hidden, "midlayer.hidden_norm.weight")])  # fmt: skip
        q, k, v = (weights[f"midlayer.self_attn.{n}_proj.weight"] @ x for n in "qkv")
        keys.append(rope(k.view(kv_heads, dim), position))
        values.append(v.view(kv_heads, dim))
        q = rope(q.view(heads, dim), position)
        group = heads // kv_heads
        cache_k = torch.stack(keys).repeat_interleave(group, 1)
        cache_v = torch.stack(values).repeat_interleave(group, 1)
        attended = torch.einsum("hd,shd->hs", q, cache_k).div(dim**0.5).softmax(-1)
        attended = torch.einsum("hs,shd->hd", attended, cache_v).flatten()
        hidden = hidden + weights["midlayer.self_attn.o_proj.weight"] @ attended
        x = norm(hidden, "midlayer.post_attention_layernorm.weight")
        gate, up = (weights[f"midlayer.mlp.{n}_proj.weight"] @ x for n in ("gate", "up"))
        return hidden + weights["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)

    combined = row.aux.flatten(1).float() @ weights["fc.weight"].T
    for position in range(anchor + 1):
        hidden = slot(row.token_ids[position + 1], combined[position], position)
    for step in range(STEPS):
        logits.append(weights["lm_head.weight"] @ norm(hidden, "norm.weight"))
        if anchor + step + 2 < len(row.token_ids):
            hidden = slot(row.token_ids[anchor + step + 2], hidden, anchor + step + 1)
    return logits


def test_training_asks_what_serving_answers(drafter, warm_start, verifier, tmp_path):
    """Every step at every anchor of two packed rows, against an engine's cache written out slot by slot."""
    weights, settings = eagle3_folder.read_drafter(warm_start)
    weights = {name: t.float() if t.is_floating_point() else t for name, t in weights.items()}
    rows, reader = read(tmp_path, (12, [[4, 12]]), (9, [[3, 9]]))
    pack = reader(rows)
    with torch.no_grad():
        trained = [h @ drafter.lm_head.weight.T for h in drafter._draft(pack)]
    start = place = 0
    for row in rows:
        states = read_states(tmp_path / row.entry.path)
        for slot in range(row.first, row.slots - 1):
            served = serve(weights, settings, verifier, states, slot)
            for step in range(int(pack.depth[place + slot - row.first])):
                actual = trained[step][place + slot - row.first]
                torch.testing.assert_close(actual, served[step], rtol=1e-4, atol=1e-5)
        start, place = start + row.slots, place + row.slots - row.first


def test_packed_is_alone(drafter, tmp_path):
    rows, reader = read(tmp_path, (20, [[5, 20]]), (33, [[9, 33]]), (14, [[2, 6], [8, 14]]))
    scale = torch.tensor([0.5, 0.3, 0.2])

    def gradients(packs):
        drafter.zero_grad()
        total = sum(drafter(pack, scale)[0] for pack in packs)
        total.backward()
        return total, {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}

    together, packed = gradients([reader(rows)])
    apart, alone = gradients([reader([row]) for row in rows])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=0)
    assert packed.keys() == alone.keys()
    for name in packed:
        torch.testing.assert_close(packed[name], alone[name], rtol=1e-4, atol=1e-6)


def test_loss_counts_guesses_not_prompts(drafter, tmp_path):
    """T01"""
    rows, reader = read(tmp_path, (12, [[2, 12]]), (50, [[40, 50]]))
    counts = [losses_per_step(drafter, reader([row]))[1].tolist() for row in rows]
    assert counts[0] == counts[1] == [9, 8, 7]


def test_a_stand_in_gives_a_connected_zero(drafter, tmp_path):
    """T01, T03"""
    rows, reader = read(tmp_path, (20, [[5, 20]]))
    loss, sums = drafter(reader(rows, counts=False), torch.ones(STEPS))
    loss.backward()
    assert loss.item() == 0 and not sums.any()
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_the_teacher_has_the_targets_eps(drafter, verifier, target, tmp_path):
    """H05"""
    rows, reader = read(tmp_path, (20, [[5, 20]]))
    pack = reader(rows)
    pack.states.mul_(1e-3)  # so small that either eps counts: at the usual size neither does
    assert drafter.norm.variance_epsilon != verifier.eps
    seen = {}

    def watch(hidden, head, teacher, teacher_head, weight):
        seen["logits"] = teacher.float() @ teacher_head.float().T
        return losses.linear_kl(hidden, head, teacher, teacher_head, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_model, "linear_kl", watch)
        drafter(pack, torch.ones(STEPS))
    expected = verifier.log_probs(pack.teacher_states(torch.bfloat16))[:, drafter.t2d].log_softmax(-1)
    asked = pack.depth > 0
    torch.testing.assert_close(seen["logits"].log_softmax(-1)[asked], expected[asked], rtol=0, atol=0.05)


def test_a_miss_is_a_token_outside_the_draft_vocabulary(drafter, tmp_path):
    rows, reader = read(tmp_path, (20, [[5, 20]]))
    pack = reader(rows)
    with torch.no_grad():
        hidden = drafter._draft(pack)
        best = (hidden[0] @ drafter.lm_head.weight.T).argmax(-1)
        pack.labels = best + drafter.d2t[best]  # as if the target had written what the drafter guesses
        right = drafter(pack, torch.ones(STEPS))[1].sum(0)
        pack.labels = torch.where(drafter.t2d[pack.labels], int((~drafter.t2d).nonzero()[0]), pack.labels)
        wrong = drafter(pack, torch.ones(STEPS))[1].sum(0)
    count, correct = draft_model.STATS.index("count"), draft_model.STATS.index("correct")
    assert right[0, correct] == right[0, count] == 14
    assert wrong[0, correct] == 0 and wrong[0, count] == 14


def test_figures_of_drafts_written_out(drafter, tmp_path):
    """What the best step is chosen by: five drafts of up to three guesses, each right (1) or wrong."""
    rows, reader = read(tmp_path, (7, [[1, 7]]))
    pack = reader(rows)
    assert pack.depth.tolist() == [3, 3, 3, 2, 1, 0]
    drafts = [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1], [1]]
    drafted = torch.zeros(STEPS, 6, dtype=torch.long)
    asked = torch.zeros(STEPS, 6, dtype=torch.bool)
    for anchor, draft_ in enumerate(drafts):
        for step, right in enumerate(draft_):
            drafted[step, anchor + step], asked[step, anchor + step] = 5 + right, True
    pack.labels = torch.full((6,), int(6 + drafter.d2t[6]))
    sums = drafter._statistics(pack, asked, torch.ones(STEPS, 6), drafted).sum(0)
    by_name = dict(zip(draft_model.STATS, sums.T.tolist(), strict=True))
    assert by_name["count"] == by_name["loss"] == [5, 4, 3]
    assert by_name["correct"] == [4, 3, 3]
    assert by_name["prefix"] == [4, 2, 1], "all guesses up to here"
    assert by_name["prefix_before"] == [5, 3, 1], "all before, and asked here"


# Its two kernels


def dense_attention(q, k0, v0, diagonals, documents):
    """The same by one dense mask, for autograd to differentiate."""
    group = q.shape[1] // k0.shape[1]
    cu_q, cu_k = documents.cu_q.tolist(), documents.cu_k.tolist()
    mask = torch.zeros(len(q), len(k0), dtype=torch.bool)
    for q0, q1, end in zip(cu_q, cu_q[1:], cu_k[1:], strict=False):
        for i in range(q0, q1):
            mask[i, cu_k[cu_q.index(q0)] : end - (q1 - 1 - i)] = True
    keys, values, masks = [k0], [v0], [mask]
    for k, v in diagonals:
        keys, values, masks = [*keys, k], [*values, v], [*masks, torch.eye(len(q), dtype=torch.bool)]
    k, v = (torch.cat(x).repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~torch.cat(masks, 1), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_merged_attention_is_dense_attention(kv_heads, steps):
    generator = torch.Generator().manual_seed(0)
    documents = Documents(torch.tensor([0, 5, 12]), torch.tensor([0, 9, 16]), 7, 9)

    def draw(rows, heads):
        return torch.randn(rows, heads, 8, generator=generator).requires_grad_()

    inputs = [draw(12, 4), draw(16, kv_heads), draw(16, kv_heads)]
    inputs += [draw(12, kv_heads) for _ in range(2 * steps)]
    grad = torch.randn(12, 4, 8, generator=generator)
    pairs = [(inputs[i], inputs[i + 1]) for i in range(3, len(inputs), 2)]
    results = []
    for function in (attention.attend, dense_attention):
        out = function(*inputs[:3], pairs, documents)
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("total", [1025, 20000])
def test_a_packs_length_may_be_any(total):
    """T09: no multiple of a block is needed, and a row packed with others has the gradients that it has alone."""
    row, generator = 205, torch.Generator().manual_seed(0)
    bounds = torch.tensor([*range(0, total, row), total])
    keys = [torch.randn(total, 1, 4, generator=generator).requires_grad_() for _ in range(3)]
    diagonal = [torch.randn(total, 1, 4, generator=generator).requires_grad_() for _ in range(2)]
    grad = torch.randn(total, 1, 4, generator=generator)
    inputs = [*keys, *diagonal]
    packed = torch.autograd.grad(
        attention.attend(*keys, [tuple(diagonal)], Documents(bounds, bounds, row, row)), inputs, grad
    )
    assert all(gradient.isfinite().all() for gradient in packed)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        own = [tensor[start:end].detach().requires_grad_() for tensor in inputs]
        one = torch.tensor([0, end - start])
        out = attention.attend(*own[:3], [tuple(own[3:])], Documents(one, one, end - start, end - start))
        for alone, together in zip(torch.autograd.grad(out, own, grad[start:end]), packed, strict=True):
            torch.testing.assert_close(alone, together[start:end])


@pytest.mark.parametrize("chunk_positions", [1, 4, 100])
def test_the_chunked_loss_is_the_plain_one(chunk_positions, monkeypatch):
    steps, positions, hidden, vocab = 3, 11, 16, 40
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * steps * vocab * chunk_positions)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(steps, positions, hidden, generator=generator).requires_grad_()
    head = torch.randn(vocab, hidden, generator=generator).requires_grad_()
    teacher, teacher_head = (torch.randn(n, hidden, generator=generator) for n in (positions, vocab))
    weight = torch.rand(steps, positions, generator=generator)
    total, each, drafted = losses.linear_kl(states, head, teacher, teacher_head, weight)
    grads = torch.autograd.grad(2 * total, [states, head])

    logits = states @ head.T
    plain = torch.nn.functional.kl_div(
        logits.log_softmax(-1), (teacher @ teacher_head.T).log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    expected = torch.autograd.grad(2 * (plain * weight).sum(), [states, head])
    torch.testing.assert_close(each, plain.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, (plain * weight).sum())
    assert torch.equal(drafted, logits.argmax(-1))
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# Where its weights come from


def test_a_warm_start_comes_through_unchanged(drafter, warm_start):
    """Every tensor of the published folder, bit for bit, as fp32 masters."""
    weights, _ = eagle3_folder.read_drafter(warm_start)
    own = draft_model.native_weights(drafter, keep_embedding=False)
    assert own.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(own[name].to(tensor.dtype), tensor), name
        assert own[name].dtype == (torch.float32 if tensor.is_floating_point() else tensor.dtype)


def test_a_drafters_own_embedding_is_used_and_kept(target, warm_start, verifier):
    """X01"""
    weights, settings = eagle3_folder.read_drafter(warm_start)
    embedding = torch.randn(captured.VOCAB, captured.HIDDEN)
    model = draft_model.build_drafter(weights | {eagle3_folder.EMBEDDING: embedding}, settings, verifier, target)
    assert torch.equal(model.embed_tokens.weight, embedding)
    assert torch.equal(draft_model.native_weights(model, keep_embedding=True)[eagle3_folder.EMBEDDING], embedding)


def test_a_nested_target_gives_its_weights(tmp_path):
    folder = tiny_models.make_tiny_kimi(tmp_path / "kimi")
    target = Target(model=folder, served_name="kimi", layer_ids=captured.LAYER_IDS, max_seq_len=64)
    verifier = read_verifier(folder)
    warm = tiny_models.make_drafter(folder, tmp_path / "drafter")
    model = draft_model.build_drafter(*eagle3_folder.read_drafter(warm), verifier, target)
    assert torch.equal(model.embed_tokens.weight, verifier.embed)
    assert torch.equal(model.verifier_lm_head.weight, verifier.head[model.t2d])


def test_missing_and_unknown_tensors_are_named(target, warm_start, verifier):
    """X02"""
    weights, settings = eagle3_folder.read_drafter(warm_start)
    with pytest.raises(ContractError, match=r"lm_head.weight"):
        draft_model.build_drafter(
            {n: t for n, t in weights.items() if n != "lm_head.weight"}, settings, verifier, target
        )
    with pytest.raises(ContractError, match=r"midlayer|layers.0.extra"):
        draft_model.build_drafter(weights | {"midlayer.extra.weight": torch.ones(1)}, settings, verifier, target)
    with pytest.raises(ContractError, match="fc.weight"):
        draft_model.build_drafter(weights | {"fc.weight": torch.ones(3, 3)}, settings, verifier, target)


@pytest.mark.parametrize("key", eagle3_folder.UNSUPPORTED)
def test_forms_that_the_forward_pass_has_not_are_refused(target, warm_start, verifier, key):
    """T17"""
    weights, settings = eagle3_folder.read_drafter(warm_start)
    with pytest.raises(ConfigError, match=key):
        draft_model.build_drafter(weights, settings | {key: 2048}, verifier, target)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e4, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e4}},
        {"rope_theta": 5e4, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_positions_turn_by_the_angle_that_is_served(target, warm_start, verifier, rope):
    """However the config spells it; what contradicts itself is refused before a step, not after the last."""
    weights, settings = eagle3_folder.read_drafter(warm_start)
    bare = {key: settings[key] for key in settings if not key.startswith("rope")}
    angles = draft_model.build_drafter(weights, bare | rope, verifier, target).rotary_emb.inv_freq
    dim = settings["head_dim"]
    torch.testing.assert_close(angles, 5e4 ** (-torch.arange(0, dim, 2) / dim))
    wrong = [
        {"rope_parameters": {"rope_theta": 1e4}},
        {"rope_scaling": "x"},
        {"rope_parameters": {"rope_type": "no"}},
    ]
    wrong += [{"rope_parameters": {"partial_rotary_factor": 0.5}}, {"rope_theta": None}, {"rms_norm_eps": 0}]
    for lie in wrong:
        with pytest.raises(ContractError, match="config.json"):
            draft_model.build_drafter(weights, bare | {"rope_theta": 5e4} | lie, verifier, target)


def test_another_activation_is_refused(target, warm_start, verifier):
    """T17: the forward pass has one, and so has the engine."""
    weights, settings = eagle3_folder.read_drafter(warm_start)
    with pytest.raises(ConfigError, match="hidden_act 'gelu'"):
        draft_model.build_drafter(weights, settings | {"hidden_act": "gelu"}, verifier, target)


def test_what_trains_is_explicit(drafter):
    everything = {n for n in draft_model.native_weights(drafter, keep_embedding=False) if n not in ("d2t", "t2d")}
    by_group = {g: set(draft_model.freeze_all_but(drafter, [g])) for g in GROUPS}
    assert set.union(*by_group.values()) == everything
    assert sum(map(len, by_group.values())) == len(everything)
    assert by_group["fc"] == {"fc.weight"} and by_group["lm_head"] == {"lm_head.weight"}
    assert "norm.weight" in by_group["norms"] and len(by_group["norms"]) == 4
    draft_model.freeze_all_but(drafter, ["fc"])
    assert [n for n, p in drafter.named_parameters() if p.requires_grad] == ["fc.weight"]


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
    """T11"""
    counts = torch.tensor([0, 5, 0, 9, 5, 0])
    assert new_drafter.draft_vocabulary(counts, 2).tolist() == [1, 3]
    assert new_drafter.draft_vocabulary(counts, 5).tolist() == [0, 1, 2, 3, 4]  # unseen low ids fill up
    with pytest.raises(ConfigError, match="7 is more than the target's 6"):
        new_drafter.draft_vocabulary(counts, 7)


@pytest.mark.parametrize("size", [None, 100])
def test_from_scratch_is_a_native_drafter(target, verifier, size):
    settings = new_drafter.first_config(target, size, 64)
    vocabulary = new_drafter.draft_vocabulary(torch.arange(captured.VOCAB), size) if size else None
    weights = new_drafter.first_weights(settings, verifier, vocabulary, seed=0)
    eagle3_folder.check_config(settings, target)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert shapes == {name: shape for name, (shape, _) in eagle3_folder.layout_of(settings).items()}
    if size:
        eagle3_folder.check_vocabulary_map(weights["d2t"], weights["t2d"])
    again = new_drafter.first_weights(settings, verifier, vocabulary, seed=0)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_what_trains_is_never_the_teachers_own(target, verifier):
    """Of a target in fp32 a master would be the very tensor that the teacher reads, and training would move both."""
    single = Verifier(verifier.embed.float(), verifier.norm.float(), verifier.head.float(), verifier.eps)
    settings = new_drafter.first_config(target, None, 64)
    model = draft_model.build_drafter(
        new_drafter.first_weights(settings, single, None, seed=0), settings, single, target
    )
    model.prepare(single, torch.float32, STEPS)
    trained = {parameter.data_ptr() for parameter in draft_model.freeze_all_but(model, GROUPS).values()}
    assert trained.isdisjoint(p.data_ptr() for p in model.parameters() if not p.requires_grad)


def test_from_scratch_begins_as_the_targets_last_layer(target, verifier):
    settings = new_drafter.first_config(target, None, 64)
    plain = new_drafter.first_weights(settings, verifier, None, seed=0)
    layer = {
        name.removeprefix("midlayer.").replace("hidden_norm", "input_layernorm"): torch.randn(tensor.shape)
        for name, tensor in plain.items()
        if name.startswith("midlayer.") and "input_layernorm" not in name
    }
    hidden = captured.HIDDEN
    layer |= {
        n: t[:, hidden:] for n, t in layer.items() if n[-13:] in ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    }
    made = new_drafter.first_weights(settings, verifier, None, 0, layer)
    assert torch.equal(made["midlayer.mlp.up_proj.weight"], layer["mlp.up_proj.weight"])
    assert torch.equal(made["midlayer.hidden_norm.weight"], layer["input_layernorm.weight"])
    query = made["midlayer.self_attn.q_proj.weight"]
    assert torch.equal(query[:, hidden:], layer["self_attn.q_proj.weight"])
    assert torch.equal(query[:, :hidden], plain["midlayer.self_attn.q_proj.weight"][:, :hidden])
    del layer["mlp.gate_proj.weight"]  # experts, say
    made = new_drafter.first_weights(settings, verifier, None, 0, layer)
    assert all(torch.equal(made[name], plain[name]) for name in plain)


def test_the_last_layer_is_read_from_a_flat_and_a_nested_target(target, tmp_path):
    flat = read_last_layer(target.model)
    nested = read_last_layer(tiny_models.make_tiny_kimi(tmp_path / "kimi"))
    assert flat.keys() == nested.keys()
    assert "self_attn.o_proj.weight" in flat and "input_layernorm.weight" in flat
