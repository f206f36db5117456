# SPDX-License-Identifier: Apache-2.0
"""What says that a request goes on which another engine has begun."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.net.trust import Secret
from vllm_ascend_pd.resume import (
    Resume,
    ResumeKey,
    RunningAt,
    completed,
    made_by,
    other_parts,
    prompt_digest,
)

_KEY = ResumeKey(Secret(b"a secret of more than 32 bytes for tests"))
_OTHER = ResumeKey(Secret(b"another secret of more than 32 bytes ...."))
_SIGNED = _KEY.sign("cmpl-1", [1, 2, 3], [7, 8])
_SOURCE = RunningAt("10.0.0.1", 14579, "key", "epoch")


def test_what_was_signed_is_accepted_after_its_way_as_json() -> None:
    assert _KEY.accepts(Resume.from_params(_SIGNED.to_params()))
    assert _SIGNED.prompt_digest == prompt_digest([1, 2, 3])


@pytest.mark.parametrize(
    "changed",
    [
        {"request_id": "cmpl-2"},
        {"output_token_ids": (7, 9)},
        {"output_token_ids": (7,)},
        {"output_token_ids": (7, 8, 0)},
        {"prompt_digest": prompt_digest([1, 2, 4])},
        {"only_exact": False},
        {"source": _SOURCE},
        {"made_by": "weights=a"},
        {"proof": ""},
        {"proof": "ä"},
    ],
    ids=str,
)
def test_nothing_else_is_accepted_with_its_proof(changed: dict[str, Any]) -> None:
    assert not _KEY.accepts(replace(_SIGNED, **changed))


@pytest.mark.parametrize(
    "changed",
    [{"host": "10.0.0.2"}, {"port": 14578}, {"key": "other"}, {"epoch": "earlier"}],
    ids=str,
)
def test_nobody_can_have_it_fetched_from_somewhere_else(changed: dict[str, Any]) -> None:
    signed = _KEY.sign("cmpl-1", [1, 2, 3], [], source=_SOURCE)
    assert _KEY.accepts(Resume.from_params(signed.to_params()))
    assert not _KEY.accepts(replace(signed, source=replace(_SOURCE, **changed)))
    assert not _KEY.accepts(replace(signed, source=None))


def test_another_secret_is_not_accepted() -> None:
    assert not _OTHER.accepts(_SIGNED)
    assert not _KEY.accepts(ResumeKey(None).sign("cmpl-1", [1, 2, 3], [7, 8]))


def test_no_field_runs_into_the_next_one() -> None:
    moved = replace(_SIGNED, request_id="cmpl-", prompt_digest="1" + _SIGNED.prompt_digest)
    assert not _KEY.accepts(moved)


def test_without_a_secret_there_is_no_proof_and_none_is_asked_for() -> None:
    unsigned = ResumeKey(None).sign("cmpl-1", [1], [2])
    assert unsigned.proof == ""
    assert ResumeKey(None).accepts(unsigned)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("output_token_ids", []),
        ("output_token_ids", [-1]),
        ("output_token_ids", [1 << 32]),
        ("output_token_ids", ["7"]),
        ("output_token_ids", [True]),
        ("output_token_ids", None),
        ("request_id", "two\nlines"),
        ("request_id", 5),
        ("prompt_digest", "x" * 300),
        ("proof", ["x"]),
        ("only_exact", "no"),
        ("steer", 1),
    ],
)
def test_anything_malformed_is_refused_and_the_field_named(field: str, value: object) -> None:
    with pytest.raises(TransferError, match=rf"kv_transfer_params\.resume: .*{field}"):
        Resume.from_params({**_SIGNED.to_params(), field: value})


@pytest.mark.parametrize("name", ["x" * 1_000_000, "x\n2030-01-01 a line of its own"])
def test_what_is_said_of_an_unknown_field_is_a_short_line(name: str) -> None:
    with pytest.raises(TransferError, match="unknown field `x") as raised:
        Resume.from_params({**_SIGNED.to_params(), name: 1})
    assert len(str(raised.value)) < 500
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [None, 5, "resume", [], {}])
def test_what_is_no_resume_at_all_is_refused(value: object) -> None:
    with pytest.raises(TransferError, match=r"kv_transfer_params\.resume"):
        Resume.from_params(value)


_ENGINE = (
    "vllm=0.30.0 config=c1 arch=LlamaForCausalLM weights=w1 load=hf dtype=bfloat16 kv_dtype=auto"
    " layout=LayersFirst block=16 page=4096 hash=sha256 wire=15"
)


@pytest.mark.parametrize(
    ("ours", "differing"),
    [
        (_ENGINE, []),
        (_ENGINE.replace("w1", "w2"), ["weights"]),
        (_ENGINE + " generation=files-1", ["generation"]),
        (_ENGINE.replace("kv_dtype=auto", "kv_dtype=fp8"), ["kv_dtype"]),
        (_ENGINE.replace("c1", "c2").replace("dtype=bf", "dtype=f"), ["config", "dtype"]),
        (_ENGINE.replace(" load=hf", " load=hf quant=awq-1"), ["quant"]),
        # KV of these does not fit, which is not asked for: it is computed.
        (_ENGINE.replace("block=16", "block=32").replace("4096", "8192"), []),
        (_ENGINE.replace("0.30.0", "0.32.0").replace("wire=15", "wire=16"), []),
        (_ENGINE + " draft=eagle-1", []),
        ("", []),
    ],
)
def test_engines_give_other_tokens_if_they_differ_in_what_decides_them(
    ours: str, differing: list[str]
) -> None:
    for one, other in ((_ENGINE, ours), (ours, _ENGINE)):
        assert other_parts(made_by(one), made_by(other)) == differing


@pytest.mark.parametrize("num_tokens", [0, 99, 100, 300])
def test_a_limit_counts_where_a_request_comes_to_it(num_tokens: int) -> None:
    lower, higher = (made_by("", length_limit=limit) for limit in ("100", "200"))
    expected = ["length_limit"] if num_tokens >= 100 else []
    assert other_parts(lower, higher, num_tokens) == expected
    assert other_parts(higher, lower, num_tokens) == expected
    assert other_parts(lower, lower, num_tokens) == []


@pytest.mark.parametrize("limit", ["abc", "-1", "1e3", "9" * 5000, "²"])
def test_a_limit_that_is_none_is_another_one(limit: str) -> None:
    assert other_parts(f"length_limit={limit}", "length_limit=100") == ["length_limit"]


@pytest.mark.parametrize(
    "part", ["adapter", "grammars", "processors", "watermark", "defaults", "parsing"]
)
def test_what_is_known_of_one_engine_only_is_not_compared(part: str) -> None:
    known, other = (made_by(_ENGINE, **{part: value}) for value in ("d1", "d2"))
    assert other_parts(known, other) == [part]
    assert other_parts(known, known) == []
    assert other_parts(known, made_by(_ENGINE)) == other_parts(made_by(_ENGINE), known) == []


@pytest.mark.parametrize(
    ("begun", "now", "expected"),
    [
        ("weights=a", "weights=b generation=c adapter=d", "weights=a adapter=d"),
        ("weights=a adapter=d", "weights=a adapter=e grammars=g", "weights=a adapter=d grammars=g"),
        ("adapter=d", "weights=a", "adapter=d weights=a"),
        ("weights=a", "", "weights=a"),
        ("", "weights=a", "weights=a"),
    ],
)
def test_of_what_made_an_answer_what_was_told_first_counts(
    begun: str, now: str, expected: str
) -> None:
    assert completed(begun, now) == expected
