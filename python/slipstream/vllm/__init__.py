"""The connector for vLLM: `--kv-transfer-config` with `kv_connector_module_path: slipstream.vllm`.

Raises `ImportError` if vLLM is missing or has an untested version.
"""

from slipstream.vllm.version import check_version

check_version()

from slipstream.vllm.connector import SlipstreamConnector  # noqa: E402  after the check

__all__ = ["SlipstreamConnector"]
