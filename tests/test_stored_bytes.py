"""The stored bytes of each kind of event, as docs/format.md describes them: they must never change."""

import pytest

from refold.core.codec import GENESIS, Entry, chain, decode, encode
from refold.core.event import (
    Called,
    Certificate,
    Expiry,
    Line,
    Measured,
    Named,
    Piece,
    Pinned,
    Replaced,
    Said,
    Span,
    Undone,
    Unknown,
    Worth,
)
from refold.core.message import (
    CompactionMarker,
    Media,
    Message,
    Opaque,
    Reasoning,
    StepStart,
    Text,
    ToolCall,
    ToolResult,
    Usage,
)
from refold.session.inspect import parse

STORED = [
    (
        Said(Line(0, "system", 7, 0, 0, apart=True), Message("system", "Be brief."), 0, 7, 1.5),
        "said",
        None,
        b'["system",7,0,0,0,7,[],null,[],true,null,null,false,false,false]',
        (b'{"time":1.5,"message":{"role":"system","parts":[{"type":"text","text":"Be brief."}]}}'),
    ),
    (
        Said(
            Line(1, "user", 12, 1, 0, expiry=Expiry(after_steps=2, mode="compact", length=500)),
            Message("user", "Fly to Oslo é中.", id="m1", meta={"a": [1, None]}, name="Ann"),
            1,
            19,
            1700000000.25,
            tags=("x", "y"),
            kind="user-input",
        ),
        "said",
        "m1",
        (
            b'["user",12,1,1,0,19,[],null,[],false,null,{"after_steps":2,"mode":"compact","len'
            b'gth":500},false,false,false]'
        ),
        (
            b'{"time":1700000000.25,"message":{"role":"user","parts":[{"type":"text","text":"F'
            b'ly to Oslo \xc3\xa9\xe4\xb8\xad."}],"id":"m1","meta":{"a":[1,null]},"name":"Ann"},"tags":["x","'
            b'y"],"kind":"user-input"}'
        ),
    ),
    (
        Said(
            Line(2, "assistant", 30, 1, 1, calls=("c1", "c1␞1"), tools=("look", "look")),
            Message(
                "assistant",
                (
                    Reasoning("hm"),
                    Text("I look."),
                    ToolCall("c1", "look", '{"q": 1}'),
                    ToolCall("c1␞1", "look", "{}"),
                    StepStart(),
                ),
                model="m",
                finish="stop",
                usage=Usage(100, 20, 50, 5, calls=2),
            ),
            2,
            49,
            2.0,
        ),
        "said",
        None,
        (
            b'["assistant",30,2,1,1,49,["c1","c1\xe2\x90\x9e1"],null,["look","look"],false,null,null,fa'
            b"lse,false,false]"
        ),
        (
            b'{"time":2.0,"message":{"role":"assistant","parts":[{"type":"reasoning","text":"h'
            b'm"},{"type":"text","text":"I look."},{"type":"tool-call","call_id":"c1","tool":"'
            b'look","input":"{\\"q\\": 1}"},{"type":"tool-call","call_id":"c1","tool":"look","in'
            b'put":"{}"},{"type":"step-start"}],"model":"m","finish":"stop","usage":{"input":1'
            b'00,"output":20,"cache_read":50,"cache_write":5,"calls":2}}}'
        ),
    ),
    (
        Said(
            Line(3, "tool", 9, 1, 1, answers="c1", tools=("look",), whole=3),
            Message(
                "tool",
                (
                    ToolResult(
                        "c1", (Text("a"), Media("image", url="https://example.org/a.png")), "look", True
                    ),
                ),
            ),
            3,
            58,
            3.0,
            piece=Piece(0, 2, (0, 2)),
        ),
        "said",
        None,
        b'["tool",9,3,1,1,58,[],"c1",["look"],false,3,null,false,false,false]',
        (
            b'{"time":3.0,"message":{"role":"tool","parts":[{"type":"tool-result","call_id":"c'
            b'1","output":[{"type":"text","text":"a"},{"type":"media","kind":"image","url":"ht'
            b'tps://example.org/a.png"}],"tool":"look","is_error":true}]},"piece":[0,2,[0,2]]}'
        ),
    ),
    (
        Said(
            Line(4, "assistant", 5, 1, 2),
            Message("assistant", "Done.", id="m4", meta={"k": 1}, model="gpt", usage=Usage(9)),
            4,
            63,
            4.0,
            "openai-chat",
            b'{"role": "assistant",  "content": "Done."}',
        ),
        "said",
        "m4",
        b'["assistant",5,4,1,2,63,[],null,[],false,null,null,false,false,false]',
        (
            b'{"time":4.0,"dialect":"openai-chat","message":{"role":"assistant","meta":{"k":1}'
            b',"model":"gpt","usage":{"input":9}},"raw":{"role": "assistant",  "content": "Don'
            b'e."}}'
        ),
    ),
    (
        Said(
            Line(5, "user", 4, 1, 2, summary=True, retry=True, wordless=True),
            Message(
                "user",
                (CompactionMarker({"type": "compaction"}), Opaque({"type": "x"}, "anthropic")),
                summary=True,
            ),
            5,
            67,
            5.0,
            kind="retry-context",
        ),
        "said",
        None,
        b'["user",4,5,1,2,67,[],null,[],false,null,null,true,true,true]',
        (
            b'{"time":5.0,"message":{"role":"user","parts":[{"type":"compaction-marker","value'
            b'":{"type":"compaction"}},{"type":"opaque","value":{"type":"x"},"dialect":"anthro'
            b'pic"}],"summary":true},"kind":"retry-context"}'
        ),
    ),
    (
        Said(Line(6, "user", 4, 2, 2), Message("user", "lone \ud800"), 6, 71, 6.0),
        "said",
        None,
        b'["user",4,6,2,2,71,[],null,[],false,null,null,false,false,false]',
        (b'{"time":6.0,"message":{"role":"user","parts":[{"type":"text","text":"lone \\ud800"}]}}'),
    ),
    (
        Replaced(
            7,
            "main",
            Span(1, 4),
            (Message("user", "A summary.", summary=True), 2),
            (
                Line(7, "user", 5, 1, 1, summary=True),
                Line(2, "assistant", 30, 1, 1, ("c1",), None, ("look",)),
            ),
            "summarize",
            "too long",
            (51, 35),
            7.0,
            1,
            Certificate("00ff", "m", 3, ("gone",), ("added",), 0.75, Usage(10, 2), 0.01, True, 4),
            Worth(100, 20, 1.5, 10, 0.002, 0.001, True, True),
        ),
        "replaced",
        None,
        (
            b'["main",[1,4],[[7,"user",5,1,1,[],null,[],0,false,null,null,true,null,false,fals'
            b'e,false],[2,"assistant",30,1,1,["c1"],null,["look"],0,false,null,null,false,null'
            b',false,false,false]],"summarize",1,[51,35]]'
        ),
        (
            b'{"shown":[{"role":"user","parts":[{"type":"text","text":"A summary."}],"summary"'
            b':true},2],"why":"too long","time":7.0,"certificate":{"digest":"00ff","model":"m"'
            b',"kept":3,"struck":["gone"],"appended":["added"],"score":0.75,"usage":{"input":1'
            b'0,"output":2},"cost":0.01,"was_cached":true,"left_out":4},"worth":{"removed":100'
            b',"rewritten":20,"after":1.5,"calls":10,"saved":0.002,"cost":0.001,"was_forced":t'
            b'rue,"was_cold":true}}'
        ),
    ),
    (
        Replaced(8, "other", Span(5, 6), (), (), "expire", "old", (4, 0), 8.0, keeps_originals=False),
        "replaced",
        None,
        b'["other",[5,6],[],"expire",0,[4,0],false]',
        b'{"shown":[],"why":"old","time":8.0}',
    ),
    (
        Replaced(
            9,
            "main",
            Span(6, 7),
            (Message("user", "\udfff"),),
            (Line(9, "user", 1, 2, 2, corrects=6),),
            "correct",
            "",
            (4, 1),
            9.0,
        ),
        "replaced",
        None,
        (
            b'["main",[6,7],[[9,"user",1,2,2,[],null,[],0,false,null,null,false,6,false,false,'
            b'false]],"correct",0,[4,1]]'
        ),
        (b'{"shown":[{"role":"user","parts":[{"type":"text","text":"\\udfff"}]}],"why":"","time":9.0}'),
    ),
    (Undone(10, 8, "no", 10.5), "undone", None, b"[8]", b'{"why":"no","time":10.5}'),
    (Undone(11, 10), "undone", None, b"[10]", b'{"why":"","time":0.0}'),
    (
        Pinned(12, (Line(1, "user", 12, 1, 0, recalled=True),), "keep", 12.0),
        "pinned",
        None,
        b'[[[1,"user",12,1,0,[],null,[],0,false,null,null,false,null,false,true,false]]]',
        b'{"why":"keep","time":12.0}',
    ),
    (
        Measured(13, "main", 4, Usage(100, 20), 90, "gpt", 13.0, "ab12", 4),
        "measured",
        None,
        b'["main",4,90,100,"gpt","ab12",4]',
        b'{"usage":{"input":100,"output":20},"model":"gpt","time":13.0}',
    ),
    (
        Measured(14, "main", 4, Usage(300, 20, calls=3), 90),
        "measured",
        None,
        b'["main",4,90,0,null,null,0]',
        b'{"usage":{"input":300,"output":20,"calls":3},"model":null,"time":0.0}',
    ),
    (
        Called(15, "main", Span(1, 4), "m", None, 2, Usage(10, 5), 0.5, 15.0),
        "called",
        None,
        b'["main",15.0,2,0.5]',
        b'{"span":[1,4],"model":"m","problem":null,"usage":{"input":10,"output":5}}',
    ),
    (
        Called(16, "main", Span(1, 4), "m", "refused: é", 1),
        "called",
        None,
        b'["main",0.0,1,0.0]',
        b'{"span":[1,4],"model":"m","problem":"refused: \xc3\xa9","usage":null}',
    ),
    (Named(17, "A title", None, 17.0), "named", None, b'["A title",null]', b'{"time":17.0}'),
    (Named(18, None, "gpt-5"), "named", None, b'[null,"gpt-5"]', b'{"time":0.0}'),
    (Unknown(19, "later", [1, "x"], {"a": None}), "later", None, b'[1,"x"]', b'{"a":null}'),
]


@pytest.mark.parametrize(("event", "kind", "id", "head", "body"), STORED, ids=range(len(STORED)))
def test_an_event_is_stored_in_the_same_bytes_as_ever(event, kind, id, head, body):
    entry = Entry(event.at, kind, id, head, body)
    assert encode(event) == entry
    assert encode(decode(entry, parse)) == entry


def test_the_chain_of_digests_is_the_same_as_ever():
    digest = GENESIS
    for event, kind, id, head, body in STORED:
        digest = chain(digest, Entry(event.at, kind, id, head, body))
    assert digest.hex() == "77d56c44f2afdb8d3ba9614ebdc423b1"
