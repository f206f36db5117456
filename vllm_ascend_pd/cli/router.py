# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd router``: its options."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from vllm_ascend_pd.errors import ConfigError

app = typer.Typer(add_completion=False)

INSTANCES = "Instances"
ROUTING = "Routing"
SECURITY = "Security"
TIMES = "Timeouts and limits"

EPILOG = """
Two engines on this machine:

    vllm-pd router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

More in docs/router.md.
"""


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@app.command(epilog=EPILOG)
def router(
    prefill: Annotated[
        list[str], option(INSTANCES, "URL of a prefill engine; repeat for more.")
    ] = [],  # noqa: B006 - typer reads it as the default
    decode: Annotated[
        list[str], option(INSTANCES, "URL of a decode engine; repeat for more.")
    ] = [],  # noqa: B006
    instances: Annotated[
        Path | None,
        option(INSTANCES, "JSON file of instances, read again when it changes."),
    ] = None,
    service_discovery: Annotated[
        str, option(INSTANCES, "static (flags, file, registration), or also k8s: pods by label.")
    ] = "static",
    static_backends: Annotated[
        str, option(INSTANCES, "URLs of engines (a,b), as production-stack gives them.")
    ] = "",
    static_models: Annotated[
        str, option(INSTANCES, "Their models, one for each, until each engine says itself.")
    ] = "",
    static_model_labels: Annotated[
        str,
        option(
            INSTANCES,
            "Their 'model' labels, one for each, which say the roles (see --prefill-model-labels)."
            " Without: each does both.",
        ),
    ] = "",
    k8s_namespace: Annotated[
        str | None, option(INSTANCES, "Namespace of the pods.", show_default="default")
    ] = None,
    k8s_label_selector: Annotated[
        str | None, option(INSTANCES, "Only pods with these labels, e.g. app=vllm.")
    ] = None,
    k8s_port: Annotated[
        int | None,
        option(
            INSTANCES, "Port of the engines in their pods.", min=1, max=65535, show_default="8000"
        ),
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        option(INSTANCES, "Cluster to ask. Without: the service account of the router's pod."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    workers: Annotated[
        int, typer.Option(help="Processes that share the port; each uses up to one core.")
    ] = 1,
    policy: Annotated[
        str | None,
        option(
            ROUTING,
            "least-loaded (default), power-of-two, prefix-aware, round-robin or session-affinity.",
        ),
    ] = None,
    session_key: Annotated[
        str | None,
        option(
            ROUTING,
            "Header or body field that tells whose request it is. Implies --policy"
            " session-affinity.",
        ),
    ] = None,
    routing_logic: Annotated[
        str | None,
        option(
            ROUTING,
            "For production-stack's command lines: disaggregated_prefill_orchestrated is what this"
            " router does. Implies --require-prefill.",
        ),
    ] = None,
    require_prefill: Annotated[
        bool,
        option(
            ROUTING,
            "Answer only with a prefill and a decode engine: 503 while there is none of a kind,"
            " instead of leaving all to the other.",
            "--require-prefill",
        ),
    ] = False,
    order: Annotated[
        str,
        option(ROUTING, "auto, prefill-first or concurrent (where the prefill engine can)."),
    ] = "auto",
    skip_prefill: Annotated[
        str,
        option(
            ROUTING,
            "When D computes a prompt itself: held (all but its last block is in its cache;"
            " prefix-aware knows), auto (that, and prompts so short that D is sooner, measured), a"
            " number (held, and prompts of fewer tokens), never or always.",
        ),
    ] = "auto",
    roles: Annotated[
        str,
        option(
            ROUTING,
            "Who says what kv_both engines are used for: operator (`vllm-pd role`), or auto: also"
            " their load, as many for prompts and as many for answers as have to do.",
        ),
    ] = "operator",
    profile: Annotated[
        Path | None,
        option(
            ROUTING,
            "What `vllm-pd profile` wrote. --roles auto goes by it and by what is asked, not by"
            " load.",
        ),
    ] = None,
    slo_ttft: Annotated[
        float | None,
        option(ROUTING, "With --profile: first token in time, seconds.", show_default="2"),
    ] = None,
    slo_itl: Annotated[
        float | None,
        option(ROUTING, "With --profile: next token in time, seconds.", show_default="0.1"),
    ] = None,
    rebalance: Annotated[
        str,
        option(
            ROUTING,
            "off, or load: streams move from the engine whose KV cache is fullest to the emptiest"
            " one, the shortest first. Of several --workers each moves its own, one at a time.",
        ),
    ] = "off",
    prefill_model_labels: Annotated[
        str, option(ROUTING, "Only prefill instances with one of these 'model' labels (a,b).")
    ] = "",
    decode_model_labels: Annotated[
        str, option(ROUTING, "Only decode instances with one of these 'model' labels (a,b).")
    ] = "",
    api_keys_file: Annotated[
        Path | None, option(SECURITY, "API keys of clients, one a line. Without: no key needed.")
    ] = None,
    tenants_file: Annotated[
        Path | None,
        option(
            SECURITY,
            "Quotas, weights and priorities by API key or header, a JSON file (docs/router.md).",
        ),
    ] = None,
    engine_api_key_file: Annotated[
        Path | None,
        option(SECURITY, "Key that engines want. Without: the client's Authorization passes."),
    ] = None,
    registration_token_file: Annotated[
        Path | None,
        option(SECURITY, "Token with which engines register. Without: only those on loopback."),
    ] = None,
    allowed_origins: Annotated[
        str, option(SECURITY, "Origins whose pages may ask, a JSON list as for vllm serve.")
    ] = '["*"]',
    allowed_methods: Annotated[str, option(SECURITY, "Methods that they may use.")] = '["*"]',
    allowed_headers: Annotated[str, option(SECURITY, "Headers that they may send.")] = '["*"]',
    allow_credentials: Annotated[
        bool, option(SECURITY, "They may send credentials.", "--allow-credentials")
    ] = False,
    secret_file: Annotated[
        Path | None,
        option(
            SECURITY,
            "The engines' security.secret_file, with which they know what they may go on with.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None, option(SECURITY, "Serve https with this certificate chain.")
    ] = None,
    tls_key: Annotated[Path | None, option(SECURITY, "Its key.")] = None,
    engine_ca: Annotated[
        Path | None, option(SECURITY, "CA bundle for https engines; the system's by default.")
    ] = None,
    max_body_mb: Annotated[int, option(TIMES, "Largest request body, MiB.", min=1)] = 64,
    keep_alive_timeout: Annotated[
        float,
        option(
            TIMES,
            "A client's connection without a request, seconds; longer than what is in front keeps"
            " idle connections.",
        ),
    ] = 130.0,
    connect_timeout: Annotated[float, option(TIMES, "Connection to an engine, seconds.")] = 5.0,
    prefill_timeout: Annotated[float, option(TIMES, "The prefill leg, seconds.")] = 300.0,
    first_token_timeout: Annotated[
        float, option(TIMES, "A streamed decode leg, up to its first token, seconds.")
    ] = 300.0,
    idle_timeout: Annotated[
        float, option(TIMES, "Between two tokens of a stream, seconds.")
    ] = 120.0,
    answer_timeout: Annotated[
        float, option(TIMES, "A decode leg that is not streamed, seconds.")
    ] = 3600.0,
    max_attempts: Annotated[int, option(TIMES, "Pairs to try for one request.")] = 3,
    resume_streams: Annotated[
        str,
        option(
            TIMES,
            "Which streams go on from another engine when theirs dies: exact (where the client gets"
            " the very tokens: temperature 0, or a seed), any (also where they are only as likely)"
            " or off.",
        ),
    ] = "exact",
    max_resumes: Annotated[int, option(TIMES, "Times that one stream goes on.")] = 3,
    tool_call_parser: Annotated[
        str,
        option(
            TIMES,
            "The engines' own --tool-call-parser. Streams with tools go on only with one that"
            " makes the same calls however many tokens come at once, as hermes does.",
        ),
    ] = "",
    max_requests: Annotated[
        int, option(TIMES, "Requests in progress on one engine; more wait in the router.")
    ] = 1024,
    max_queued: Annotated[int, option(TIMES, "Requests that wait; more get 429.")] = 4096,
    queue_timeout: Annotated[
        float, option(TIMES, "For room on an engine, then 429; seconds.")
    ] = 60.0,
    probe_interval: Annotated[float, option(TIMES, "Between two health probes, seconds.")] = 2.0,
    engine_stats_interval: Annotated[
        float, option(TIMES, "Between two looks at an engine's metrics, seconds; 0: each probe.")
    ] = 0.0,
    request_stats_window: Annotated[
        float, option(TIMES, "What /status tells of now is of so many seconds.")
    ] = 60.0,
    drain_timeout: Annotated[
        float, option(TIMES, "For requests in progress when the router stops, seconds.", min=0)
    ] = 60.0,
    access_log: Annotated[
        str, typer.Option(help="One line per request: text, json or off.")
    ] = "text",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="Send spans there, e.g. http://127.0.0.1:4318/v1/traces."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """OpenAI's API in front of prefill and decode engines."""
    from vllm_ascend_pd.router import config as router_config

    levels = {"debug", "info", "warning", "error"}
    if log_level.lower() not in levels:
        raise typer.BadParameter(f"one of {', '.join(sorted(levels))}", param_hint="--log-level")
    if service_discovery not in ("static", "k8s"):
        raise typer.BadParameter("static or k8s", param_hint="--service-discovery")
    if routing_logic not in (None, "disaggregated_prefill_orchestrated"):
        raise typer.BadParameter(
            "only disaggregated_prefill_orchestrated", param_hint="--routing-logic"
        )
    if session_key and policy not in (None, "session-affinity"):
        raise typer.BadParameter(
            f"it is for --policy session-affinity, and {policy} does not look at it: leave out one"
            " of the two",
            param_hint="--session-key",
        )
    of_kubernetes = {
        "--k8s-namespace": k8s_namespace,
        "--k8s-label-selector": k8s_label_selector,
        "--k8s-port": k8s_port,
        "--kubeconfig": kubeconfig,
    }
    given = [name for name, value in of_kubernetes.items() if value is not None]
    if given and service_discovery != "k8s":
        raise typer.BadParameter(
            "without --service-discovery k8s no pods are looked for: add that, or leave this out",
            param_hint=", ".join(given),
        )
    limits = {"slo_ttft_s": slo_ttft, "slo_itl_s": slo_itl}
    slo = {name: limit for name, limit in limits.items() if limit is not None}
    if slo and profile is None:
        raise typer.BadParameter("--slo-ttft and --slo-itl are for --profile")
    config = router_config.RouterConfig(
        host=host,
        port=port,
        num_workers=workers,
        prefills=tuple(prefill),
        decodes=tuple(decode),
        instances_file=instances,
        backends=router_config.static_backends(static_backends, static_models, static_model_labels),
        policy=policy or ("session-affinity" if session_key else "least-loaded"),
        session_key=session_key,
        stats_window_s=request_stats_window,
        order=order,  # type: ignore[arg-type]
        roles=roles,  # type: ignore[arg-type]
        planning=router_config.Planning(profile, **slo) if profile else None,
        rebalance=rebalance,  # type: ignore[arg-type]
        require_prefill=require_prefill or routing_logic is not None,
        api_keys_file=api_keys_file,
        tenants_file=tenants_file,
        engine_api_key_file=engine_api_key_file,
        registration_token_file=registration_token_file,
        secret_file=secret_file,
        prefill_labels=_labels(prefill_model_labels),
        decode_labels=_labels(decode_model_labels),
        kubernetes=router_config.Kubernetes(
            k8s_namespace or "default", k8s_label_selector or "", k8s_port or 8000, kubeconfig
        )
        if service_discovery == "k8s"
        else None,
        drain_s=drain_timeout,
        access_log=access_log,  # type: ignore[arg-type]
        otlp_endpoint=otlp_endpoint,
        log_level=log_level,
        timeouts=router_config.Timeouts(
            keep_alive_s=keep_alive_timeout,
            connect_s=connect_timeout,
            prefill_s=prefill_timeout,
            first_token_s=first_token_timeout,
            idle_s=idle_timeout,
            answer_s=answer_timeout,
        ),
        retries=router_config.Retries(
            max_attempts=max_attempts,
            resume=resume_streams,  # type: ignore[arg-type]
            max_resumes=max_resumes,
            tool_call_parser=tool_call_parser,
        ),
        queueing=router_config.Queueing(max_requests, max_queued, queue_timeout),
        probes=router_config.Probes(
            interval_s=probe_interval, load_interval_s=engine_stats_interval
        ),
        cors=router_config.CORS(
            _json_list(allowed_origins, "--allowed-origins"),
            _json_list(allowed_methods, "--allowed-methods"),
            _json_list(allowed_headers, "--allowed-headers"),
            allow_credentials,
        ),
        max_body_bytes=max_body_mb << 20,
        tls=router_config.TLS(tls_certificate, tls_key, engine_ca),
        skip=router_config.skip_mode(skip_prefill),
    )
    router_config.set_up_logging(config)
    if workers > 1:
        from vllm_ascend_pd.router.workers.keeper import serve
    else:
        from vllm_ascend_pd.router.server import serve

    def tell(url: str) -> None:
        with contextlib.suppress(OSError):  # it serves although the disk of its log is full
            typer.echo(f"vllm-pd router listens on {url}", err=access_log == "json")

    serve(config, tell)


def _labels(text: str) -> tuple[str, ...]:
    return tuple(label for label in (part.strip() for part in text.split(",")) if label)


def _json_list(text: str, option: str) -> tuple[str, ...]:
    """``ConfigError`` unless it is a JSON list of strings."""
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{option} {text!r}: a JSON list of strings, such as '[\"*\"]'") from e
