"""`onedraw serve`: serve a model over HTTP, with OpenAI's and Anthropic's APIs.

The server runs until it gets a signal. At start it prints a curl command to try it with.
"""

from __future__ import annotations

import argparse
import logging.config
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from onedraw.cli import terminal
from onedraw.cli.flags import add_learning, add_record, add_settings, argument_type, read_settings, recorded
from onedraw.cli.ps import registered
from onedraw.cluster.autoscaling import DOWNSCALE_DELAY, UPSCALE_DELAY, AutoscalingConfig, replica_range
from onedraw.errors import BadSetting
from onedraw.settings import Settings, api_key, otlp_traces_endpoint, ray_address, size_in_bytes, update_token

if TYPE_CHECKING:
    from onedraw.build.engine_process import StartEngine

HELP = "serve a model over HTTP, with OpenAI's interface"
EXAMPLES = """examples:
  onedraw serve smollm2
  onedraw serve ./my-model --host 0.0.0.0 --port 8080 --api-key SECRET --max-batch 32
  onedraw serve smollm2 --replicas 2 --threads 1
"""
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOG_FORMATS = ("text", "json")
SCALING = ("target_ongoing_requests", "upscale_delay", "downscale_delay")  # options that need a range of replicas
KEY_LIMITS = {
    "requests": "requests that an API key, or a client address without keys, may have running and waiting at once",
    "tokens": "tokens (prompt and max_tokens of every choice) that it may have running and waiting at once",
    "requests-per-minute": "requests that it may send in a minute",
    "tokens-per-minute": "tokens of prompts and replies that it may use in a minute; then its next requests wait",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2", help="the model to serve (default: smollm2)")
    web = parser.add_argument_group("how to serve it")
    web.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    web.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on (default: 8000)")
    web.add_argument(
        "--api-key",
        metavar="KEY",
        help="bearer token that clients must send; /health needs none (default: ONEDRAW_API_KEY, or no key)",
    )
    web.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="named keys, one `NAME KEY` per line; names appear in the log",
    )
    web.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web origin that may call this server; repeatable",
    )
    web.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name accepted without an API key (DNS-rebinding protection); may be repeated",
    )
    web.add_argument("--alias", action="append", default=[], metavar="NAME", help="another name for the model; may be repeated")
    web.add_argument(
        "--root-path", default="", metavar="PREFIX", help="also serve below this path, like /llm, for a proxy that keeps it"
    )
    web.add_argument(
        "--strict-model-names",
        action="store_true",
        help="refuse requests for a model of another name; without it every name means the served model",
    )
    web.add_argument(
        "--max-body",
        type=argument_type(size_in_bytes),
        default=size_in_bytes("32MiB"),
        metavar="SIZE",
        help="largest request body (default: 32MiB)",
    )
    web.add_argument(
        "--lenient",
        action="store_true",
        help="ignore unknown request fields (named in a response header) instead of refusing them",
    )
    web.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="X",
        help="seconds that running replies may take after SIGTERM (default: 30)",
    )
    web.add_argument(
        "--request-seconds",
        type=float,
        metavar="X",
        help="longest time from a request's arrival to its last token in seconds (default: no limit)",
    )
    web.add_argument(
        "--engine-process",
        choices=("on", "off"),
        default="off",
        help="run the engine and the weights in a process of their own, so that HTTP does not delay them (default: off)",
    )
    web.add_argument(
        "--update-token",
        metavar="TOKEN",
        help="bearer token that allows to pause the server and to update its weights, see docs/training.md "
        "(default: ONEDRAW_UPDATE_TOKEN, or none: neither is allowed)",
    )
    web.add_argument(
        "--weight-dir",
        type=Path,
        metavar="FOLDER",
        help="folder below which updates of the weights are read; needs --update-token",
    )
    for name, what in KEY_LIMITS.items():
        web.add_argument(f"--key-{name}", type=int, metavar="N", help=f"{what} (default: any)")
    web.add_argument(
        "--metrics-prefix",
        default="",
        metavar="TEXT",
        help="prefix of the names in /metrics, like vllm: for dashboards made for vLLM",
    )
    web.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send an OpenTelemetry span per request there, like http://127.0.0.1:4318/v1/traces "
        "(default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, else no traces)",
    )
    web.add_argument(
        "--batch-dir",
        type=Path,
        metavar="FOLDER",
        help="folder for uploaded files and batches, which survive a restart (default: batches in the cache folder)",
    )
    web.add_argument(
        "--batch-disk",
        type=argument_type(size_in_bytes),
        default=size_in_bytes("8GiB"),
        metavar="SIZE",
        help="most disk space for them (default: 8GiB); with several keys, each may use half of it",
    )
    web.add_argument(
        "--replicas",
        type=argument_type(replica_range),
        metavar="N",
        help="run N engines with the model as actors in a Ray cluster; when one dies, its replies go on elsewhere with the same "
        "tokens, and another one is started (SIGHUP replaces all, one by one); with a range like 1..4 the load decides how many",
    )
    web.add_argument(
        "--target-ongoing-requests",
        type=float,
        metavar="X",
        help="requests per replica, running and waiting, that --replicas MIN..MAX aims at (default: as many as run at once)",
    )
    web.add_argument(
        "--upscale-delay",
        type=float,
        metavar="SECONDS",
        help=f"how long the load must ask for more replicas before they are started (default: {UPSCALE_DELAY:g})",
    )
    web.add_argument(
        "--downscale-delay",
        type=float,
        metavar="SECONDS",
        help=f"how long the load must need fewer replicas before some end (default: {DOWNSCALE_DELAY:g}); their replies go on "
        "elsewhere",
    )
    web.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="HOST:PORT of the head of a Ray cluster for --replicas, or auto for the one on this machine "
        "(default: RAY_ADDRESS, else a cluster of this machine alone is started, on 127.0.0.1)",
    )
    web.add_argument(
        "--replica-gpus",
        type=float,
        metavar="X",
        help="GPUs of each replica, like 0.5 (default: the CUDA devices that --devices names, or 1 if the cluster has any)",
    )
    web.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="how much to log (default: info)")
    web.add_argument(
        "--log-format", choices=LOG_FORMATS, default="text", help="text, or one JSON object per line (default: text)"
    )
    web.add_argument("--log-prompts", action="store_true", help="also log the text of prompts; otherwise they are never logged")
    add_record(parser)
    add_learning(parser)
    add_settings(parser)


def engine_elsewhere(arguments: argparse.Namespace, settings: Settings) -> StartEngine | None:
    """Return a function that starts the engine outside of this process, or None if the engine runs in this process. With
    --replicas, install a handler of SIGHUP that replaces the replicas one by one."""
    from onedraw.build.engine_process import EngineProcess

    if arguments.replicas is None:
        for name in ("ray_address", "replica_gpus", *SCALING):
            if getattr(arguments, name) is not None:
                raise BadSetting(f"--{name.replace('_', '-')}: needs --replicas, the number of engines")
        return EngineProcess if arguments.engine_process == "on" else None
    from onedraw.cluster.ray_replicas import RayReplicas, ReplicaOptions
    from onedraw.server.logs import log_config

    logging.config.dictConfig(log_config(arguments.log_level, arguments.log_format))  # Replicas log before uvicorn applies this.
    given = {name: getattr(arguments, name) for name in SCALING if getattr(arguments, name) is not None}
    least, most = arguments.replicas
    scaling = AutoscalingConfig(least, most, **given)
    if given and least == most:
        raise BadSetting(f"--{min(given).replace('_', '-')}: the number of replicas is fixed; write a range like --replicas 1..4")
    options = ReplicaOptions(scaling, arguments.ray_address or ray_address(), arguments.replica_gpus)
    replicas = RayReplicas(settings, options)
    signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=replicas.restart, daemon=True).start())
    return lambda _: replicas


def run(arguments: argparse.Namespace) -> int:
    try:
        from onedraw.server.auth import read_keys
        from onedraw.server.config import ServerOptions
        from onedraw.server.serve import bind, serve
    except ImportError as error:
        raise BadSetting(f"serve needs the web packages, and {error.name} is missing: pip install 'onedraw[serve]'") from None
    from onedraw.build.drafters import proposer_names
    from onedraw.build.llm import build_llm

    settings = read_settings(arguments)
    options = ServerOptions(
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key if arguments.api_key is not None else api_key(),
        api_keys=() if arguments.api_key_file is None else read_keys(arguments.api_key_file),
        cors_origins=tuple(arguments.cors_origin),
        allow_hosts=tuple(arguments.allow_host),
        max_body=arguments.max_body,
        lenient=arguments.lenient,
        drain_seconds=arguments.drain_seconds,
        aliases=tuple(arguments.alias),
        root_path=arguments.root_path,
        strict_model_names=arguments.strict_model_names,
        request_seconds=arguments.request_seconds,
        key_requests=arguments.key_requests,
        key_tokens=arguments.key_tokens,
        key_requests_per_minute=arguments.key_requests_per_minute,
        key_tokens_per_minute=arguments.key_tokens_per_minute,
        update_token=arguments.update_token if arguments.update_token is not None else update_token(),
        weight_dir=arguments.weight_dir,
        metrics_prefix=arguments.metrics_prefix,
        otlp_traces_endpoint=arguments.otlp_traces_endpoint or otlp_traces_endpoint(),
        batch_dir=arguments.batch_dir or settings.cache_folder / "batches",
        batch_disk=arguments.batch_disk,
        log_level=arguments.log_level,
        log_format=arguments.log_format,
        log_prompts=arguments.log_prompts,
    )
    with closing(bind(options.host, options.port)) as listener:  # before the slow load, so that a port in use fails at once
        with terminal.progress() as notify:
            llm = build_llm(settings, notify, start_engine=engine_elsewhere(arguments, settings))
        with llm, recorded(llm, arguments) as llm:
            cache, (host, port) = settings.cache_folder, listener.getsockname()[:2]
            with registered(cache, model=llm.card.name, device=llm.card.device, url=f"http://{host}:{port}"):
                serve(llm, options, listener, proposers=proposer_names(settings))
    return 0
