"""Counts equal the vocabulary's own, media follow their providers' rules, and recorded usage bears it out."""

import base64
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks import counting
from hypothesis import given
from hypothesis import strategies as st

from refold.core.message import Media, Message, Opaque, Text, ToolCall, ToolResult
from refold.dialects import openai_chat
from refold.models import images
from refold.models.calibrate import HIGHEST, LOWEST, Anchor, Calibration, estimate, scale, update
from refold.models.count import Counter, counter
from refold.models.images import Crops, Grid, Patches, Tiles
from refold.models.schemas import Declared, typed

DATA = Path(__file__).parents[2] / "shared" / "data"
recorded = pytest.mark.skipif(
    not DATA.exists(), reason="the recorded conversations are not beside the project"
)

PLAIN = Counter()
VOCABULARIES = {
    "o200k_base": "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken",
    "cl100k_base": "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken",
}
MODELS = {"o200k_base": "gpt-5", "cl100k_base": "gpt-4"}
TEXTS = [
    "Which of our flights are late?",
    "<|endoftext|> and <|im_start|>system are text here",
    'def add(a, b):\n\treturn a + b  # {"sum": 3}\n\n\n',
    "今日は天気がいい。오늘은 날씨가 좋다. Сегодня хорошая погода 🙂👩‍👩‍👧",
    "a" * 5_000 + " " * 5_000 + "1234567890" * 100,
]


# Text


@pytest.fixture(params=VOCABULARIES)
def reference(request):
    """tiktoken itself, where it is installed and has its files: it would download them otherwise."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed: nothing to compare with")
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", "")
    file = Path(cache) / hashlib.sha1(VOCABULARIES[request.param].encode()).hexdigest()
    if not cache or not file.exists():
        pytest.skip(f"TIKTOKEN_CACHE_DIR has no {request.param}: nothing to compare with")
    return tiktoken.get_encoding(request.param), counter(MODELS[request.param])


# proves: C6
def test_counts_equal_tiktokens(reference):
    encoding, count = reference
    for text in TEXTS:
        assert count.text(text) == len(encoding.encode_ordinary(text)), text[:80]

    @given(st.text())
    def whatever_the_text(text):
        whole = text.encode("utf-8", "replace").decode()
        assert count.text(text) == len(encoding.encode_ordinary(whole))

    whatever_the_text()


OFFLINE = """
import socket, sys
socket.socket = socket.create_connection = None  # whoever would ask the network fails
from refold.models.count import counter
print([counter(model).text(text) for model in ("gpt-4", "gpt-4o") for text in sys.argv[1:]])
"""


# proves: C6
def test_known_texts_have_their_known_counts_without_a_network():
    """The counts are those that OpenAI's cookbook prints for cl100k_base and o200k_base."""
    known = {"tiktoken is great!": (6, 6), "2 + 2 = 4": (7, 7), "お誕生日おめでとう": (9, 8)}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *known], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(done) == [counts[n] for n in range(2) for counts in known.values()]


@pytest.mark.parametrize("model", ["gpt-5", "gpt-4", "gemini-2.5-pro", "llama-3.3-70b", "qwen3-max"])
def test_what_looks_like_a_special_token_is_counted_as_the_text_it_is(model):
    for special in ("<|endoftext|>", "<|im_start|>", "<bos>", "<think>", "[INST]", "<|eot_id|>"):
        assert counter(model).text(f"a {special} b") > counter(model).text("a x b")


@given(st.text(alphabet=st.characters(categories=["L", "Cs"])))
def test_a_lone_surrogate_counts_like_the_mark_that_stands_for_it(text):
    marked = text.encode("utf-8", "replace").decode()
    assert PLAIN.text(text) == PLAIN.text(marked)
    assert PLAIN.json({"text": text}) > 0


def test_older_and_newer_openai_models_have_their_own_vocabulary():
    old, new = counter("gpt-4").framing.vocabulary, counter("gpt-4o").framing.vocabulary
    assert (old, new) == ("cl100k_base", "o200k_base")
    named = {m: counter(m).framing.vocabulary for m in ("openai/gpt-4-0613", "gpt-3.5-turbo", "gpt-4-turbo")}
    assert set(named.values()) == {"cl100k_base"}
    named = {m: counter(m).framing.vocabulary for m in ("gpt-4.1-mini", "chatgpt-4o-latest", "o3", "gpt-6")}
    assert set(named.values()) == {"o200k_base"}


# proves: C6
def test_a_model_without_a_public_vocabulary_has_a_margin():
    assert counter("gpt-5").margin == counter(None).margin == 1.0
    assert counter("grok-4").margin == counter("nobody-knows-it").margin == 1.1
    assert 1.0 < counter("claude-sonnet-4-5").margin < counter("claude-opus-4-8").margin
    text = "The words of a message, a dozen or so of them."
    assert counter("claude-sonnet-4-5").text(text) > counter("gpt-5").text(text)


# The rule of four characters


# proves: E1
@given(st.text())
def test_the_estimate_takes_four_characters_for_a_token_rounded_up(text):
    count = counter("claude-opus-4-8", kind="estimate")
    assert count.text(text) == -(-len(text) // 4)
    assert count.message(Message("user", (Text(text),))) == 4 + -(-len(text) // 4)


# proves: E1
def test_the_estimate_counts_calls_by_name_and_input_and_results_by_output():
    count = counter(None, kind="estimate")
    assert count.message(Message("assistant", (ToolCall("c1", "look", '{"a":1}'),))) == 4 + 1 + 2
    assert count.message(Message("tool", (ToolResult("c1", "x" * 41),))) == 4 + 11
    assert count.message(Message("tool", (ToolResult("c1", ""),))) == 4


# Messages, tools and system text


# proves: E1
def test_without_a_model_a_message_takes_its_words_and_four():
    call = Message("assistant", (Text("Let me see."), ToolCall("c1", "look", "{}")))
    assert PLAIN.message(call) == 4 + PLAIN.text("Let me see.") + PLAIN.text("look") + PLAIN.text("{}")
    assert PLAIN.message(Message("user", "")) == 4
    assert counter(None).message(call) == PLAIN.message(call)


def test_code_in_a_call_is_counted_unescaped_where_the_model_reads_it_so():
    input = json.dumps({"path": "a.py", "text": 'if "x":\n\treturn "\\\\"\n' * 50})
    call = Message("assistant", (ToolCall("c1", "write", input),))
    claude, plain = counter("claude-sonnet-4-5"), counter("claude-sonnet-4-5").margin * PLAIN.text(input)
    assert claude.message(call) < plain
    broken = Message("assistant", (ToolCall("c1", "write", '{"path": "a.p'),))
    assert claude.message(broken) > 0


def test_tools_are_written_as_types_for_openai():
    schema = {
        "type": "object",
        "$defs": {"Way": {"enum": ["north", "south"]}},
        "properties": {
            "way": {"$ref": "#/$defs/Way", "description": "Where to."},
            "far": {"type": ["integer", "null"], "default": 3},
            "stops": {"type": "array", "items": {"type": "object", "properties": {"at": {"type": "string"}}}},
        },
        "required": ["way"],
    }
    text = typed([Declared("go", "Goes.\nFar.", schema)])
    assert text.splitlines()[6:-2] == [
        "// Goes.",
        "// Far.",
        "type go = (_: {",
        "// Where to.",
        'way: "north" | "south",',
        "far?: number | null, // default: 3",
        "stops?: {",
        "at?: string,",
        "}[],",
        "}) => any;",
    ]


def test_a_schema_that_refers_to_itself_is_counted_all_the_same():
    inner = {"type": "object", "properties": {name: {"$ref": "#/$defs/Node"} for name in "abcde"}}
    schema = {"$defs": {"Node": inner}, "properties": {"root": {"$ref": "#/$defs/Node"}}}
    tool = {"type": "function", "function": {"name": "grow", "parameters": schema}}
    assert 0 < counter("gpt-5").tools([tool]) < 100_000


@pytest.mark.parametrize("model", ["gpt-5", "claude-opus-4-8", "gemini-3-pro", "nobody-knows-it"])
def test_tools_count_whatever_they_look_like(model):
    count = counter(model)
    chat = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    blocks = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    served = {"type": "web_search_20250305", "name": "web_search"}
    later = {**blocks, "defer_loading": True}
    assert count.tools([]) == 0
    for tool in (chat, blocks, served):
        assert count.tools([tool]) > 0
        assert count.tools([tool, tool]) > count.tools([tool])
    assert count.tools([chat, later, later]) == count.tools([chat, later])
    for odd in (None, "look", 3, {}, {"function": None}, {"type": "function", "function": {"parameters": 3}}):
        assert count.tools([odd]) >= 0


def test_the_system_text_counts_as_a_text_or_as_blocks():
    count = counter("claude-sonnet-4-5")
    blocks = [{"type": "text", "text": "Be brief."}]
    assert count.system("Be brief.") == count.system(blocks) > count.text("Be brief.")
    assert count.system(None) == count.system([]) == count.system("") == 0


def test_sealed_reasoning_counts_by_its_length_and_not_by_its_letters():
    sealed = {"type": "reasoning", "encrypted_content": "gAAAAAB" * 1_000, "summary": []}
    message = Message("assistant", (Opaque(sealed, "openai-responses"),))
    assert 7_000 // 6 <= counter("gpt-5").message(message) < 7_000 // 5


# Images, documents, sounds


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(9)


def jpeg(width: int, height: int, before: int = 60_000) -> bytes:
    camera = b"\xff\xe1" + struct.pack(">H", before + 2) + bytes(before)
    frame = b"\xff\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + camera * 3 + frame + b"\xff\xd9"


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(3)


def webp(kind: bytes, width: int, height: int) -> bytes:
    body = {
        b"VP8 ": bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height),
        b"VP8L": b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14),
        b"VP8X": bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little"),
    }[kind]
    return b"RIFF" + bytes(4) + b"WEBP" + kind + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "data",
    [png(640, 480), jpeg(640, 480), gif(640, 480)]
    + [webp(kind, 640, 480) for kind in (b"VP8 ", b"VP8L", b"VP8X")],
    ids=["png", "jpeg", "gif", "webp", "webp-lossless", "webp-extended"],
)
def test_an_image_says_its_size_in_its_first_bytes(data):
    assert images.size(data) == (640, 480)
    for end in range(0, len(data), max(1, len(data) // 50)):
        images.size(data[:end])  # cut off anywhere, it raises nothing


@given(st.binary(max_size=200))
def test_whatever_the_bytes_are_nothing_is_raised(data):
    for start in (
        b"",
        b"\xff\xd8\xff",
        b"RIFF0000WEBPVP8X",
        b"RIFF0000WAVE",
        b"\x89PNG\r\n\x1a\n",
        b"%PDF-1.7",
    ):
        images.size(start + data)
        assert images.pages(start + data) >= 1
        assert images.seconds(start + data, 1_000) >= 0


def test_a_size_that_no_image_has_is_not_believed():
    assert images.size(png(2**31, 3)) is None
    assert images.size(png(0, 3)) is None


def test_images_take_what_their_providers_say():
    standard, high = Grid(28, 1_568, 1_568), Grid(28, 2_576, 4_784)
    assert [standard(*size) for size in ((200, 200), (1000, 1000), (1092, 1092))] == [64, 1296, 1521]
    assert (standard(1920, 1080), high(1920, 1080), high(3840, 2160)) == (1560, 2691, 4784)
    assert Patches(1.0, 1_536, 2_048)(1024, 1024) == 1024
    assert Patches(1.0, 1_536, 2_048)(1800, 2400) == 1452
    assert Tiles(85, 170)(1024, 1024) == 765
    assert Tiles(85, 170)(2048, 4096) == 1105
    assert Crops()(384, 384) == 258
    assert Crops()(960, 540) == 6 * 258


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_no_image_takes_nothing_or_more_than_its_budget(width, height):
    assert 1 <= Grid(28, 1_568, 1_568)(width, height) <= 1_568
    assert 1 <= Patches(1.0, 1_536, 2_048)(width, height) <= 1_536
    assert 85 + 170 <= Tiles(85, 170)(width, height) <= 85 + 8 * 170
    assert 258 <= Crops()(width, height) <= 64 * 258


def test_an_image_whose_size_cannot_be_seen_is_taken_for_a_screen():
    for model in ("gpt-5", "gpt-5.6", "claude-sonnet-4-5", "claude-opus-4-8", "gemini-2.5-pro", "grok-4"):
        rates = counter(model).framing.media
        screen = rates.image(1920, 1080)
        assert rates.tokens(Media("image", url="https://example.org/a.png")) == screen
        assert rates.tokens(Media("image", data="no base64 at all", mime="image/png")) == screen
        by_id = Message("user", (Opaque({"type": "image", "source": {"type": "file", "file_id": "f"}}),))
        assert counter(model).message(by_id) == counter(model).framing.message + screen


def test_data_in_a_url_counts_like_data():
    data = base64.b64encode(png(540, 360)).decode()
    count = counter("claude-haiku-4-5")
    apart = Message("user", (Media("image", data=data, mime="image/png"),))
    inside = Message("user", (Media("image", url=f"data:image/png;base64,{data}"),))
    assert count.message(apart) == count.message(inside) == count.framing.message + 20 * 13


def test_a_document_counts_by_its_pages_and_a_text_by_its_words():
    rates = counter("claude-sonnet-4-5").framing.media
    listed = b"%PDF-1.4 /Type /Pages /Type /Page /Type/Page /Type /Page>>"
    said = b"%PDF-1.7 <</Linearized 1 /L 9 /N 7>>"
    long = listed.ljust(images.SCANNED_BYTES * 2)
    for data, pages in ((listed, 3), (said, 7), (bytes(90_000), 3), (b"", 1), (long, 6)):
        media = Media("file", data=base64.b64encode(data).decode(), mime="application/pdf")
        assert rates.tokens(media) == pages * rates.page, data[:20]
    words = base64.b64encode(b"late " * 500).decode()
    text = Message("user", (Media("file", data=words, mime="text/plain"),))
    assert 500 < counter("gpt-5").message(text) < 600


def test_a_sound_counts_by_its_seconds():
    rates = counter("gemini-2.5-pro").framing.media
    wave = b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 24_000, 48_000, 2, 16)
    data = base64.b64encode(wave.ljust(480_000, b"\0")).decode()
    assert rates.tokens(Media("audio", data=data, mime="wav")) == 320


# Calibration


shares = st.tuples(st.integers(1, 100_000), st.integers(0, 10_000_000))


@given(st.lists(shares, max_size=40))
def test_no_usage_can_take_a_calibration_out_of_its_bounds(calls):
    calibration, anchor = Calibration(), None
    for counted, reported in calls:
        calibration = update(calibration, counted, reported, anchor)
        anchor = Anchor(counted, reported)
    assert LOWEST <= calibration.ratio <= HIGHEST
    assert len(msgspec.json.encode(calibration)) < 400
    assert msgspec.json.decode(msgspec.json.encode(calibration), type=Calibration) == calibration


@given(shares, st.integers(0, 200_000), st.integers(0, 200_000), st.floats(LOWEST, HIGHEST))
def test_more_is_never_estimated_to_take_less(anchored, one, other, ratio):
    count, calibration = counter("claude-sonnet-4-5"), Calibration(((ratio, 100),))
    for anchor in (None, Anchor(*anchored)):
        less, more = sorted((one, other))
        assert estimate(less, count, calibration, anchor) <= estimate(more, count, calibration, anchor)


@given(shares, st.floats(LOWEST, HIGHEST))
def test_what_was_measured_is_estimated_as_it_was_measured(anchored, ratio):
    anchor, calibration = Anchor(*anchored), Calibration(((ratio, 100),))
    assert estimate(anchor.counted, counter(None), calibration, anchor) == anchor.tokens
    slope, constant = scale(counter(None), calibration, anchor)
    assert constant >= 0
    assert slope * anchor.counted + constant == pytest.approx(anchor.tokens, abs=1)


def test_one_outlier_among_three_changes_nothing():
    steady = Calibration(((1.2, 500), (1.2, 500)))
    for outlier in (900_000, 1):
        assert update(steady, 1_500, outlier, Anchor(1_000, 1_000)).ratio == 1.2


def test_what_nobody_counted_is_no_fault_of_the_vocabulary():
    assert update(Calibration(), 60, 1_700) == Calibration()


def test_a_second_conversation_starts_with_what_the_first_has_learned():
    count, calibration, anchor = counter("nobody-knows-it"), Calibration(), None
    for counted in (2_000, 3_000, 3_500, 9_000):
        calibration = update(calibration, counted, round(1.4 * counted), anchor)
        anchor = Anchor(counted, round(1.4 * counted))
    assert estimate(5_000, count, calibration) == pytest.approx(7_000, rel=0.01)


def test_an_estimate_without_usage_is_the_count_and_what_every_request_takes():
    assert estimate(1_000, counter("gpt-5"), Calibration()) == 1_003


# What was recorded


@recorded
def test_a_chat_without_tools_takes_exactly_what_openai_reports():
    plain = [
        call
        for call in counting.openai_calls(DATA)
        if call.kind == "plain"
        and call.model.startswith("gpt-4")
        and not call.request.get("tools")
        and all(message["role"] != "tool" for message in call.request["messages"])
    ]
    assert len(plain) >= 3
    for call in plain:
        assert counting.openai_estimate(call, counter(call.model)) == call.tokens


@recorded
def test_openais_requests_are_estimated_closely_and_hardly_ever_too_low():
    errors = counting.openai(DATA)
    assert len(errors.percents) > 80
    assert errors.too_low <= 0.02
    assert 0 <= sorted(errors.percents)[len(errors.percents) // 2] <= 10


@recorded
def test_uncalibrated_at_most_one_claude_call_in_twenty_is_too_low():
    for errors in counting.uncalibrated(DATA):
        assert errors.too_low <= 0.05, errors.cells()
        assert sorted(errors.percents)[len(errors.percents) // 2] <= 15, errors.cells()


# proves: X1
@recorded
def test_after_three_calls_a_claude_conversation_is_estimated_within_five_percent():
    errors = counting.calibrated(DATA)
    assert len(errors.percents) > 400
    assert min(errors.percents) >= -2
    assert max(errors.percents) <= 5


# proves: C6
@recorded
def test_the_margin_is_the_least_that_recorded_usage_bears_out():
    known = counter(counting.CONVERSATION_MODEL).margin
    less = list(counting.uncalibrated(DATA, counting.with_margin(known - 0.05)))
    assert any(errors.too_low > 0.05 for errors in less)


@recorded
def test_every_recorded_message_counts():
    for file in sorted((DATA / "traces").glob("*.jsonl")):
        if not file.name.startswith("anthropic_"):
            for line in file.read_text().splitlines():
                for message in json.loads(line)["messages"][:40]:
                    parsed = openai_chat.parse(message)
                    for model in ("gpt-5", "claude-opus-5", None):
                        assert counter(model).message(parsed) >= 4
