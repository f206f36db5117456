# SPDX-License-Identifier: Apache-2.0
"""Reading a topology file: every error names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from vllm_ascend_pd.cli import router as router_cli
from vllm_ascend_pd.cluster import topology
from vllm_ascend_pd.cluster.topology import (
    LOCAL,
    EngineGroup,
    Host,
    RouterSpec,
    load,
    parse,
    parse_cores,
    render_args,
    render_router_args,
)
from vllm_ascend_pd.errors import ConfigError

TWO_HOSTS = {"a": {"address": "10.0.0.1"}, "b": {"address": "10.0.0.2"}}


def test_a_model_is_enough() -> None:
    parsed = parse({"model": "m"})
    assert parsed.hosts == {LOCAL: Host()}
    assert parsed.prefill == parsed.decode == (EngineGroup(),)
    assert parsed.router == RouterSpec()
    assert parsed.name == "m"


def test_engines_that_can_do_both_are_alone_unless_others_are_asked_for() -> None:
    assert parse({"model": "m", "both": [{"count": 2}]}).groups == (
        ("prefill", ()),
        ("decode", ()),
        ("both", (EngineGroup(count=2),)),
    )
    assert parse({"model": "m", "both": [{}], "decode": [{}]}).decode == (EngineGroup(),)
    none = parse({"model": "m", "both": [{"count": 0}]})
    assert none.prefill == none.decode == (EngineGroup(),)


def test_the_file_of_the_module_docstring(tmp_path: Path) -> None:
    text = (topology.__doc__ or "").split("\n\n", 1)[1]
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    loaded = load(path)
    assert loaded.hosts["node-b"].address == "10.0.0.2"
    assert loaded.prefill == (EngineGroup(host="node-a", count=2),)
    assert loaded.decode[0].args == {"max-num-seqs": 512}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": 2}, r"the topology: unknown keys \['replicas'\]; valid: .*'model'"),
        ({"hosts": {"a": {"ip": "::1"}}}, r"hosts.a: unknown keys \['ip'\]; valid: \['address'"),
        ({"prefill": [{}, {"n": 1}]}, r"prefill\[1\]: unknown keys \['n'\]; valid: .*'count'"),
        ({"decode": [{"tp": 1}]}, r"decode\[0\]: unknown keys \['tp'\]"),
        ({"router": {"prot": 1}}, r"router: unknown keys \['prot'\]; valid: .*'port'"),
        ({"model": 7}, "model must be a string, not 7"),
        ({"prefill": {"count": 1}}, "prefill must be a list, not dict"),
        ({"prefill": [{"count": "2"}]}, r"prefill\[0\].count must be int, not '2'"),
        (
            {"prefill": [{"count": -1}, {"count": 2}]},
            r"prefill\[0\].count must not be negative, not -1",
        ),
        ({"prefill": [{"count": 0}]}, "prefill: at least one engine is needed"),
        ({"decode": []}, "decode: at least one engine is needed"),
        ({"both": [{}]}, "both: at least two engines are needed, or one beside"),
        ({"both": [{"count": 0}], "decode": []}, "decode: at least one engine is needed"),
        ({"both": [{"count": 2}, {"host": "c"}]}, r"both\[1\].host: 'c' is not in hosts"),
        ({"decode": [{"host": "c"}]}, r"decode\[0\].host: 'c' is not in hosts \['localhost'\]"),
        ({"router": {"host": "c"}}, r"router.host: 'c' is not in hosts"),
        ({"router": {"port": 0}}, r"router.port must be within 1..65535, not 0"),
        ({"prefill": [{"kv_port": 70000}]}, r"prefill\[0\].kv_port must be within 1..65535"),
        ({"hosts": {"a": {"address": "node-a"}}}, "hosts.a.address must be an IP address"),
        ({"hosts": {"a": {"cores": "0..3"}}}, "hosts.a.cores: '0..3' is not a list of cores"),
        ({"hosts": {"a": {}, "b": {}}}, "hosts.a.address 127.0.0.1 is a loopback address"),
        ({"hosts": {1: {}}}, "a key of hosts must be a string, not 1"),
        ({"hosts": []}, "hosts must be a mapping, not list"),
        ({"device": "tpu"}, r"device: 'tpu' is not one of \['cpu', 'cuda', 'npu'\]"),
        ({"args": {"port": 1}}, "args.port: set by the topology itself"),
        ({"extra_config": {"router": None}}, "extra_config.router must be a mapping, not NoneType"),
        ({"extra_config": {"security": []}}, "extra_config.security must be a mapping, not list"),
        ({"extra_config": {"router": {"token_file": 5}}}, "router.token_file must be a string"),
        ({"extra_config": {"security": {"secret_file": 5}}}, "security.secret_file must be a str"),
        ({"router": {"args": {"--port": 1}}}, "router.args.--port: set by the topology itself"),
        ({"router": {"args": {"tls_key": "k"}}}, "router.args.tls_key: .* put what ends TLS in fr"),
        ({"router": {"args": {"tls-certificate": "c"}}}, "router.args.tls-certificate: .* http"),
        ({"more_args": ["--dtype", "auto", "--port=1"]}, "more_args: --port is set by vllm-pd"),
        ({"args": {"ssl_certfile": "c"}}, "args.ssl_certfile: .* ask its engines over http"),
        ({"prefill": [{"args": {"headless": True}}]}, r"prefill\[0\].args.headless: .* by hand"),
        ({"args": {"data_parallel_rank": 0}}, "args.data_parallel_rank: .* behind one front end"),
        ({"more_args": ["-dph"]}, "more_args: -dph: .* behind one front end"),
        ({"more_args": ["--uds=/tmp/s"]}, "more_args: --uds: .* at a port of each"),
        ({"decode": [{"args": {"kv_transfer_config": {}}}]}, r"decode\[0\].args.kv_transfer_con"),
    ],
)
def test_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"model": "m", **changes})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"env": ["TOKEN=4711"]}, "env must be a mapping, not list"),
        ({"env": "TOKEN=4711"}, "env must be a mapping, not str"),
        ({"env": {"TOKEN": 4711}}, r"env\.TOKEN must be a string, not int"),
        ({"prefill": [{"env": {"TOKEN": 4711}}]}, r"prefill\[0\]\.env\.TOKEN must be a st.* int"),
        ({"more_args": "--api-key 4711"}, "more_args must be a list, not str"),
        ({"model": {"token": 4711}}, "model must be a string, not dict"),
    ],
    ids=str,
)
def test_what_may_be_a_secret_is_not_told(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse({"model": "m", **wrong})
    assert "4711" not in str(caught.value)


def test_option_of_an_engine_that_is_off_is_taken() -> None:
    parse({"model": "m", "args": {"headless": False, "uds": None}})


def test_option_of_an_engine_stays_as_it_is_written() -> None:
    parsed = parse({"model": "m", "args": {"gpu-memory-utilization": 1.0}})
    assert render_args(parsed.args) == ["--gpu-memory-utilization", "1.0"]


@pytest.mark.parametrize("raw", [None, [], "model", 7])
def test_not_a_mapping(raw: Any) -> None:
    with pytest.raises(ConfigError, match="the topology must be a mapping"):
        parse(raw)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    with pytest.raises(ConfigError, match=r"t.yaml: cannot be read \(No such file"):
        load(path)
    path.write_text("model: [")
    with pytest.raises(ConfigError, match=r"t.yaml: not YAML"):
        load(path)
    path.write_bytes(b"model: m\nserved_model_name: \xff\n")
    with pytest.raises(ConfigError, match=r"t.yaml:2 is not UTF-8: invalid start byte"):
        load(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"t.yaml: the topology: \['model'\] is missing"):
        load(path)


def test_cores() -> None:
    assert parse_cores("x", "0-3,8, 10-11") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cores("x", "5,5") == (5,)
    for wrong in ("", "a", "3-1", "1-", "-1", "1,,2", "\u00b2", "1-\u00b2"):
        with pytest.raises(ConfigError, match="x: "):
            parse_cores("x", wrong)


def test_args_become_words() -> None:
    args = {
        "max_model_len": 4096,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "compilation-config": {"level": 3},
        "middleware": ["a", "b"],
        "ignore-patterns": ["c", "d"],
        "lora-modules": [{"name": "sql", "path": "/x"}, "e=/y"],
        "allowed-origins": ["https://f", "https://g"],
        "dtype": None,
    }
    assert render_args(args) == [
        *("--max-model-len", "4096", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--compilation-config", '{"level":3}', "--middleware", "a", "--middleware", "b"),
        *("--ignore-patterns", "c", "d"),
        *("--lora-modules", '{"name":"sql","path":"/x"}', "e=/y"),
        *("--allowed-origins", '["https://f","https://g"]'),
    ]


def test_args_of_the_router_become_words_that_it_knows() -> None:
    args = {
        "require_prefill": False,
        "allow-credentials": True,
        "allowed-origins": ["https://a", "https://b"],
        "allowed_methods": '["GET"]',
        "prefill": ["http://a:1", "http://b:2"],
        "prefill-model-labels": ["p", "q"],
        "rebalance": False,  # `off` in a file
        "workers": 2,
        "profile": None,
    }
    words = render_router_args(args)
    assert words == [
        *("--allow-credentials", "--allowed-origins", '["https://a","https://b"]'),
        *("--allowed-methods", '["GET"]', "--prefill", "http://a:1", "--prefill", "http://b:2"),
        *("--prefill-model-labels", "p,q"),
        *("--rebalance", "off", "--workers", "2"),
    ]
    command = typer.main.get_command(router_cli.app)
    assert command.make_context("router", words).params["prefill"] == ["http://a:1", "http://b:2"]
    flags = [p.name for p in command.params if getattr(p, "is_flag", False)]
    assert "require_prefill" in flags
    assert not render_router_args(dict.fromkeys(filter(None, flags), False))
