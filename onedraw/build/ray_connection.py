"""The connection to a Ray cluster: one that runs, or one of this machine alone that ends with this process.

In: an address, or none. Out: the module `ray`, connected. Ray is imported on first use. A cluster that is started here listens on
127.0.0.1 only. One that listens on other addresses must ask for a token, as Ray does by default.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from typing import Any

from onedraw.errors import BadSetting

# Environment variables of a cluster that is started here. Ray replaces 127.0.0.1 by the machine's address on a network, unless
# RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0, which turns clusters of several machines off and is the default on Windows and macOS. By
# default Ray also runs its actors (workers) with a lower priority than other programs, which would slow a server down.
OWN_CLUSTER: Mapping[str, str] = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
OBJECT_BYTES = 100 * 2**20  # shared memory of a cluster that is started here; only messages over 100 kB go through it
QUIET: Mapping[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False}


def import_ray(flag: str) -> Any:
    """Import Ray and return the module, or raise BadSetting that names the option `flag`."""
    try:
        import ray
    except ImportError:
        raise BadSetting(f"{flag} needs Ray; install it with: pip install 'onedraw[serve,ray]'") from None
    return ray


def connected(flag: str, address: str = "auto") -> Any:
    """Return `ray`, connected to the cluster at this address, for the option `flag`. With `auto` it is the one that RAY_ADDRESS
    names or that runs on this machine."""
    if address.startswith("ray://"):
        raise BadSetting(f"{flag}: {address} is a Ray client's address; give the head node's HOST:PORT, usually port 6379")
    ray = import_ray(flag)
    if not ray.is_initialized():
        try:
            ray.init(address=address, **QUIET)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            reason = str(error).partition("\n")[0]
            raise BadSetting(
                f"{flag}: no Ray cluster answers ({reason}); start one with `ray start --head`, or set RAY_ADDRESS"
            ) from None
    return ray


def started_here(flag: str, *, cpus: int) -> Any:
    """Return `ray`, connected to a new cluster of this machine alone, which offers `cpus` CPUs to actors."""
    os.environ.update(OWN_CLUSTER)  # must be set before Ray is imported, because the import reads them
    ray = import_ray(flag)
    try:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=OBJECT_BYTES, **QUIET)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise BadSetting(f"{flag}: Ray does not start on this machine: {str(error).partition(chr(10))[0]}") from None
    return ray


def uses_token() -> bool:
    """Whether calls of this process, and calls to it, need a token. A process that Ray starts has this setting from its node."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return bool(is_token_auth_enabled())


def require_loopback(ray: Any, flag: str) -> None:
    """Raise if a cluster that asks for no token listens beyond this machine."""
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if not all(ipaddress.ip_address(one).is_loopback for one in addresses):
        raise BadSetting(
            f"{flag}: this Ray cluster listens on {', '.join(sorted(addresses))} and asks for no token, so everyone who reaches "
            "its ports can run programs on it; set RAY_AUTH_MODE=token on all of its machines, see docs/cluster.md"
        )
