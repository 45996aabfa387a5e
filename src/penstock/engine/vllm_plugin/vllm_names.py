"""Every name of vLLM that the plugin relies on, with the reason; `make check-vllm` holds it against vLLM's sources.

`module:Class.attribute` is a definition, an attribute that a class sets on itself, or one that it inherits. Parameters
in brackets are given by name, or in this order. `package~text` is a text that some file of the package contains.

A test compares this table with the plugin's code (`tests/engine/test_vllm_names.py`): a new import, or a new attribute
of what the code calls as vLLM does (`core`, `engine`, `state`, ...), needs an entry here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """Names that serve one purpose."""

    why: str
    names: tuple[str, ...]
    since: tuple[int, int] = (0, 0)
    """The first minor version that has them."""
    until: tuple[int, int] = (9999, 0)
    """The first minor version that is without them again."""

    def is_in(self, version: str) -> bool:
        """Whether a version such as `0.32.0+cpu` should have these names."""
        major, minor = (int(part) for part in re.findall(r"\d+", version)[:2])
        return self.since <= (major, minor) < self.until


def _in(owner: str, names: str) -> tuple[str, ...]:
    """Names of a module (ends with a colon), attributes of a class (`module:Class.`), or texts (`package~`)."""
    return tuple(owner + name for name in names.split())


_CONFIG = "vllm.config:"
_CORE = "vllm.v1.engine.core:EngineCoreProc."
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_CLIENT = "vllm.v1.engine.core_client:DPLBAsyncMPClient."
_LLM = "vllm.v1.engine.async_llm:AsyncLLM."
_OUTPUTS = "vllm.v1.engine.output_processor:"
_TRANSFER = "vllm.distributed.weight_transfer."
_LAYERS = "vllm.model_executor.layers."
_RELOAD = "vllm.model_executor.model_loader.reload"

_HANGING_IN = (
    Use("the entry point `register`", ("vllm.plugins:load_general_plugins", "vllm.plugins~vllm.general_plugins")),
    Use(
        "options that hang in the worker's methods, the backend and the middleware",
        (
            *_in("vllm.engine.arg_utils:EngineArgs.", "worker_extension_cls weight_transfer_config"),
            "vllm.entrypoints~--middleware",
        ),
    ),
    Use(
        "variables that allow control calls, and adapters while the engine runs",
        _in("vllm.envs:", "VLLM_SERVER_DEV_MODE VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_API_KEY"),
    ),
    Use("the middleware finds the engine and the API keys", _in("vllm.entrypoints~", "state.engine_client state.args")),
    Use(
        "routes that the middleware follows or leaves open",
        _in(
            "vllm.entrypoints~",
            '"/inference/v1/generate" "/v1/completions" "/v1/chat/completions" "/abort_requests" "/pause" "/resume" '
            '"/sleep" "/wake_up" "/finish_weight_update" "/collective_rpc" "/health" "/metrics" "/version"',
        ),
    ),
    Use(
        "`server` runs the API server, which has the token endpoint on this option alone",
        ("vllm.entrypoints.launchers.api_server.entry:main", "vllm.entrypoints~enable_scale_out"),
        since=(0, 32),
    ),
    Use("`server` runs the API server", ("vllm.entrypoints.openai.api_server:run_server",), until=(0, 32)),
    Use(
        "native updates over shared memory",
        (
            *_in(_TRANSFER + "factory:WeightTransferEngineFactory.", "register_engine _registry"),
            *_in(_TRANSFER + "base:", "WeightTransferInitInfo WeightTransferUpdateInfo"),
            *_in(
                _TRANSFER + "base:WeightTransferEngine.",
                "init_info_cls update_info_cls model model_config init_transfer_engine(init_info) start_weight_update "
                "receive_weights(update_info) finish_weight_update shutdown",
            ),
        ),
    ),
    Use("a backend has a sender", (_TRANSFER + "base:WeightTransferEngine.trainer_send_weights",), until=(0, 32)),
)

_IN_THE_CORE = (
    Use(
        "patched: one more kind of item in the core's input queue, and answers to such",
        _in(_CORE, "_handle_client_request(request_type,request) input_queue output_queue addresses"),
    ),
    Use(
        "patched: a call whose result cannot be sent fails, and does not end the core's output thread",
        (
            _CORE + "collective_rpc(method,timeout,args,kwargs)",
            *_in("vllm.v1.serial_utils:", "MsgpackEncoder.encode UtilityResult"),
        ),
    ),
    Use(
        "patched: a pause leaves the cache of processed images, whose other half is in the API server",
        (
            "vllm.v1.engine.core:EngineCore",
            *_in(_CORE, "_reset_caches(reset_running_requests,reset_connector) reset_mm_cache"),
        ),
    ),
    Use(
        "pauses, sleeps and updates are one state",
        _in(
            _CORE,
            "pause_scheduler(mode,clear_cache) resume_scheduler is_scheduler_paused sleep(level,mode) wake_up(tags)",
        ),
    ),
    Use(
        "an update empties what is cached of the old weights",
        _in(_CORE, "reset_prefix_cache(reset_running_requests,reset_connector) reset_encoder_cache"),
    ),
    Use("requests of the core", _in(_SCHEDULER, "get_num_unfinished_requests get_request_counts")),
    Use(
        "patched: steps are small between prepare and apply",
        (
            *_in(_CORE, "step_fn batch_queue scheduler"),
            *_in(
                _SCHEDULER,
                "max_num_scheduled_tokens max_num_running_reqs num_spec_tokens block_size max_model_len "
                "scheduler_config",
            ),
            *_in(_CONFIG + "SchedulerConfig.", "enable_chunked_prefill disable_chunked_mm_input"),
        ),
    ),
    Use("the core labels what it makes", _in(_CORE, "set_weight_version get_weight_version"), since=(0, 32)),
    Use(
        "a mark among the outputs tells the API server which version comes next",
        _in("vllm.v1.engine:", "EngineCoreOutput.request_id EngineCoreOutput.new_token_ids EngineCoreOutputs.outputs"),
    ),
)

_IN_THE_API_SERVER = (
    Use(
        "patched: calls on the engine are led to the core's one state",
        (
            *_in(
                _LLM,
                "engine_core vllm_config pause_generation(mode,clear_cache) resume_generation is_paused "
                "collective_rpc(method,timeout,args,kwargs) finish_weight_update",
            ),
            *_in(
                _CLIENT,
                "call_utility_async(method) sleep_async(level,mode) wake_up_async(tags) "
                "pause_scheduler_async(mode,clear_cache)",
            ),
        ),
    ),
    Use(
        "an older name of the pause that waits", (_LLM + "pause_generation(wait_for_inflight_requests)",), until=(0, 32)
    ),
    Use("the engine's label of its weights", _in(_LLM, "update_weight_version get_weight_version"), since=(0, 32)),
    Use(
        "patched: the answers of every data-parallel replica are returned",
        _in(_CLIENT, "core_engines _call_utility_async(method) collective_rpc_async(method,timeout,args,kwargs)"),
    ),
    Use(
        "patched: every worker's answer to a call is read",
        _in(
            "vllm.v1.executor.multiproc_executor:MultiprocExecutor.",
            "collective_rpc(method,timeout,args,kwargs,non_block,unique_reply_rank)",
        ),
    ),
    Use(
        "what `/penstock/info` tells, and which tensors an update must bring",
        (
            *_in(_CONFIG + "VllmConfig.", "model_config parallel_config lora_config device_config"),
            *_in(
                _CONFIG + "ParallelConfig.",
                "tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_index world_size rank",
            ),
            *_in(
                _CONFIG + "ModelConfig.",
                "get_vocab_size max_model_len logprobs_mode enable_sleep_mode is_moe model dtype hf_config "
                "hf_text_config",
            ),
            _CONFIG + "DeviceConfig.device_type",
        ),
    ),
    Use(
        "patched: every request is followed, and one that was cut goes on where it was",
        (
            _LLM + "output_processor",
            *_in(
                _OUTPUTS + "OutputProcessor.",
                "add_request(request,prompt,parent_req,request_index,queue) process_outputs(engine_core_outputs) "
                "request_states _finish_request(req_state)",
            ),
            *_in(_CLIENT, "add_request_async(request) outputs_queue"),
            *_in(
                _OUTPUTS + "RequestState.",
                "make_request_output(new_token_ids,pooling_output,finish_reason,stop_reason) detokenizer "
                "logprobs_processor parent_req external_req_id request_index queue",
            ),
            _OUTPUTS + "RequestOutputCollector.put(output)",
            *_in(
                "vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.",
                "update(new_token_ids,stop_terminated) output_token_ids num_output_tokens",
            ),
            *_in("vllm.v1.engine.logprobs:LogprobsProcessor.", "logprobs cumulative_logprob"),
            *_in("vllm.v1.engine.parallel_sampling:ParentRequest.", "n external_req_id"),
            *_in("vllm.v1.engine:EngineCoreRequest.", "request_id prompt_token_ids sampling_params external_req_id"),
            *_in(
                "vllm.sampling_params:SamplingParams.",
                "extra_args logprobs prompt_logprobs max_tokens min_tokens structured_outputs",
            ),
            *_in("vllm.outputs:", "RequestOutput.outputs CompletionOutput.token_ids CompletionOutput.logprobs"),
            *_in("vllm.logprobs:Logprob.", "logprob rank decoded_token"),
            *_in("vllm.v1.engine:", "FINISH_REASON_STRINGS FinishReason"),
            "vllm.exceptions:VLLMValidationError",
        ),
    ),
    Use("vLLM's own versions of a sample's tokens", (_OUTPUTS + "RequestState.weight_version_starts",), since=(0, 32)),
)

_ON_A_WORKER = (
    Use(
        "methods mixed into the worker reach its model",
        (
            *_in("vllm.v1.worker.worker_base:WorkerBase.", "device model_runner model_config vllm_config"),
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
        ),
    ),
    Use(
        "vLLM's layerwise reload, and the end of one that was cut",
        (
            *_in(_RELOAD + ":", "initialize_layerwise_reload(model) finalize_layerwise_reload layerwise"),
            *_in(_RELOAD + ".layerwise:", "get_layerwise_info(layer) _place_kernel_tensors(layer,info)"),
            *_in(_RELOAD + ".types:LayerReloadingInfo.", "can_load reset"),
        ),
    ),
    Use(
        "layers that compute other tensors from their weights have no plan of copies",
        (
            *_in(_LAYERS + "attention:Attention.", "process_weights_after_loading impl"),
            _LAYERS + "attention:MMEncoderAttention.process_weights_after_loading",
            _LAYERS + "quantization.base_config:QuantizeMethodBase.process_weights_after_loading",
            "vllm.v1.attention.backend:AttentionImplBase.process_weights_after_loading",
            *_in("vllm.v1.attention.backends.flashinfer:FlashInferImpl.", "_sinks_source sinks"),
            *_in(_LAYERS + "linear:", "UnquantizedLinearMethod LinearBase.quant_method"),
            _LAYERS + "vocab_parallel_embedding:UnquantizedEmbeddingMethod",
            _LAYERS + "fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        ),
    ),
    Use(
        "attention of several kinds", ("vllm.v1.attention.backend:AttentionImplBase.get_impl_variants",), since=(0, 32)
    ),
    Use(
        "repairs of the reload on CPU, and the packed weights that a checksum covers",
        (
            *_in("vllm.platforms", ":current_platform .interface:Platform.is_cpu"),
            *_in(_LAYERS + "utils", ":dispatch_cpu_unquantized_gemm(layer,remove_weight) ~layer.cpu_linear"),
            _LAYERS + "fused_moe.fused_moe_method_base:FusedMoEMethodBase.moe_kernel",
            *_in(_LAYERS + "linear:", "LinearBase.input_size RowParallelLinear.input_size_per_partition"),
        ),
    ),
    Use(
        "a model under its own names while it serves adapters",
        ("vllm.lora.layers:BaseLayerWithLoRA", "vllm.lora.layers~self.base_layer"),
    ),
    Use(
        "adapters are copied to the device again after a sleep that drops weights",
        (
            "vllm.v1.worker.lora_model_runner_mixin~self.lora_manager",
            "vllm.lora.worker_manager:WorkerLoRAManager._adapter_manager",
            *_in(
                "vllm.lora.model_manager:LoRAModelManager.",
                "lora_index_to_id deactivate_adapter(adapter_id) _last_mapping",
            ),
        ),
    ),
)

USES = _HANGING_IN + _IN_THE_CORE + _IN_THE_API_SERVER + _ON_A_WORKER
"""By purpose; a name may serve several."""
