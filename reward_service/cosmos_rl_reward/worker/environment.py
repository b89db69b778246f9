"""Which environment variables a reward gets: an allow-list, so that no secret of the service or of its user is among
them. Anything else belongs into ``environment`` of the reward's table."""

import re
from collections.abc import Mapping

_NAMES = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TERM", "TZ", "LANG", "LANGUAGE"),
    *("TMPDIR", "TMP", "TEMP", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CC", "CXX"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    "TOKENIZERS_PARALLELISM",
}
_PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "CONDA_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),
    *("CUDA", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "HIP_", "HSA_", "ROCR_", "ROCM_", "ORT_", "TF_", "XLA_"),
    *("TORCH", "PYTORCH_", "TRITON_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DIFFUSERS_", "VLLM_"),
)
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)")
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")


def filter_environment(variables: Mapping[str, str], downloads: bool = False) -> dict[str, str]:
    """Those of ``variables`` that a reward's process gets.

    Args:
        downloads: it may fetch weights from the hub, with the user's token. Else it is kept from asking the hub, unless
            ``HF_HUB_OFFLINE`` says otherwise.
    """
    kept = {name: value for name, value in variables.items() if _is_allowed(name.upper())}
    if downloads:
        return kept | {name: variables[name] for name in _HUB_TOKENS if name in variables}
    return {"HF_HUB_OFFLINE": "1", **kept}


def _is_allowed(name: str) -> bool:
    return name in _NAMES or (name.startswith(_PREFIXES) and not _SECRET.search(name))
