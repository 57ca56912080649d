//! The architectures that are read: by `model_type`, and by the name of the class in `architectures`.
//!
//! Both are matched whole. A relative of a known architecture (`minimax_m3` of `minimax_m2`) may have other layers, so it is
//! refused until it has a row here. Source of rows: the configuration classes of Transformers 5.24 and the models of vLLM 0.33.

/// How the reader understands files of some architectures.
#[derive(Debug)]
pub(super) struct Class {
    /// Values of `model_type`.
    pub(super) types: &'static [&'static str],
    /// Values of `architectures`, of the language model alone.
    pub(super) architectures: &'static [&'static str],
    pub(super) experts: Mixture,
    pub(super) attention: Kind,
    pub(super) windows: Windows,
    /// Experts have the width `moe_intermediate_size`, which the file must state; otherwise `intermediate_size`.
    pub(super) own_width: bool,
    /// Size of a head if the file has none; `None`: the hidden size over the number of heads.
    pub(super) head_dim: Option<u32>,
    /// `sliding_window` of a file without it; `None`: it must state it.
    pub(super) window: Option<u32>,
    /// `num_attention_heads` and `num_key_value_heads` of a file without them; `None`: it must state them.
    pub(super) heads: Option<[u32; 2]>,
    /// A file without `num_key_value_heads` has as many as query heads. Otherwise it must state them.
    pub(super) heads_default: bool,
    /// `tie_word_embeddings` of a file without it.
    pub(super) tied: bool,
    /// Query and key are normalized per head, whatever the file says.
    pub(super) qk_norm: bool,
}

/// The MLPs of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mixture {
    /// Dense in every layer.
    Dense,
    /// Routed experts, in all layers but some.
    Routed(Shared, DenseLayers),
    /// As the first, if the file has no experts (`granitemoehybrid`, whose dense MLP is its shared expert).
    SharedOrRouted,
}

/// Experts that process every token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shared {
    /// None.
    No,
    /// A number of experts of the routed ones' width, which the file must state.
    Count,
    /// Their total width, which the file must state.
    Width,
    /// One of the routed ones' width.
    One,
}

/// Layers with a dense MLP instead of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DenseLayers {
    /// None.
    No,
    /// The first `first_k_dense_replace`, and those that `moe_layer_freq` leaves out.
    First,
    /// Those of `mlp_only_layers`, and those that `decoder_sparse_step` leaves out.
    Step,
    /// Those that `moe_layers` or `interleave_moe_layer_step` leave out.
    Interleaved,
    /// Those outside `moe_layer_start_index` to `moe_layer_end_index`, and those that `moe_layer_interval` leaves out.
    Range,
}

/// Kinds of attention of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Grouped-query attention, with or without windows.
    Grouped,
    /// Multi-head latent attention.
    Latent,
    /// Multi-head latent attention over the tokens that an index chooses.
    LatentSparse,
    /// Gated `DeltaNet`, with grouped-query attention in some layers.
    Delta,
    /// State-space layers, whose absence the file must state.
    StateSpace,
}

/// Which layers have the `sliding_window` of a file without `layer_types`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Windows {
    /// The class has no windows.
    No,
    /// None, unless `use_sliding_window`.
    Off,
    /// All.
    All,
    /// All; a file without the key has none.
    AllIfStated,
    /// All but each n-th.
    Every(u32),
    /// Chunks: all but each 4th, or those of `no_rope_layers`.
    Chunked,
}

const BASE: Class = Class {
    types: &[],
    architectures: &[],
    experts: Mixture::Dense,
    attention: Kind::Grouped,
    windows: Windows::No,
    own_width: false,
    head_dim: None,
    window: None,
    heads: None,
    heads_default: false,
    tied: false,
    qk_norm: false,
};

const DEEPSEEK: Class = Class {
    experts: Mixture::Routed(Shared::Count, DenseLayers::First),
    attention: Kind::Latent,
    own_width: true,
    heads_default: true,
    ..BASE
};

const QWEN_MOE: Class = Class {
    experts: Mixture::Routed(Shared::No, DenseLayers::Step),
    windows: Windows::Off,
    own_width: true,
    qk_norm: true,
    ..BASE
};

const QWEN: Class = Class {
    windows: Windows::Off,
    ..BASE
};

const CLASSES: &[Class] = &[
    Class {
        types: &["llama", "yi", "solar"],
        architectures: &[
            "LlamaForCausalLM",
            "LLaMAForCausalLM",
            "SolarForCausalLM",
            "YiForCausalLM",
        ],
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["mistral"],
        architectures: &["MistralForCausalLM"],
        windows: Windows::All,
        ..BASE
    },
    Class {
        types: &["ministral", "ministral3"],
        architectures: &[
            "MistralForCausalLM",
            "MinistralForCausalLM",
            "Ministral3ForCausalLM",
        ],
        windows: Windows::All,
        ..BASE
    },
    Class {
        types: &["mixtral"],
        architectures: &["MixtralForCausalLM"],
        experts: Mixture::Routed(Shared::No, DenseLayers::No),
        windows: Windows::AllIfStated,
        ..BASE
    },
    Class {
        types: &[
            "qwen2",
            "qwen2_vl",
            "qwen2_vl_text",
            "qwen2_5_vl",
            "qwen2_5_vl_text",
            "mimo",
        ],
        architectures: &[
            "Qwen2ForCausalLM",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "MiMoForCausalLM",
        ],
        ..QWEN
    },
    Class {
        types: &["qwen2_moe"],
        architectures: &["Qwen2MoeForCausalLM"],
        experts: Mixture::Routed(Shared::Width, DenseLayers::Step),
        qk_norm: false,
        ..QWEN_MOE
    },
    Class {
        types: &["qwen3", "qwen3_vl_text"],
        architectures: &["Qwen3ForCausalLM"],
        head_dim: Some(128),
        qk_norm: true,
        ..QWEN
    },
    Class {
        types: &["qwen3_moe", "qwen3_vl_moe_text"],
        architectures: &["Qwen3MoeForCausalLM"],
        ..QWEN_MOE
    },
    Class {
        types: &["qwen3_next"],
        architectures: &["Qwen3NextForCausalLM"],
        experts: Mixture::Routed(Shared::Width, DenseLayers::Step),
        attention: Kind::Delta,
        head_dim: Some(256),
        ..QWEN_MOE
    },
    Class {
        types: &["qwen3_5", "qwen3_5_text"],
        architectures: &["Qwen3_5ForCausalLM"],
        attention: Kind::Delta,
        head_dim: Some(256),
        qk_norm: true,
        ..BASE
    },
    Class {
        types: &["qwen3_5_moe", "qwen3_5_moe_text"],
        architectures: &["Qwen3_5MoeForCausalLM"],
        experts: Mixture::Routed(Shared::Width, DenseLayers::No),
        attention: Kind::Delta,
        own_width: true,
        head_dim: Some(256),
        qk_norm: true,
        ..BASE
    },
    Class {
        types: &["deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"],
        architectures: &[
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "KimiK2ForCausalLM",
            "KimiK25ForConditionalGeneration",
        ],
        ..DEEPSEEK
    },
    Class {
        types: &["deepseek_v32"],
        architectures: &["DeepseekV32ForCausalLM"],
        attention: Kind::LatentSparse,
        ..DEEPSEEK
    },
    Class {
        types: &["glm_moe_dsa"],
        architectures: &["GlmMoeDsaForCausalLM"],
        attention: Kind::LatentSparse,
        ..DEEPSEEK
    },
    Class {
        types: &["glm4_moe_lite"],
        architectures: &["Glm4MoeLiteForCausalLM"],
        ..DEEPSEEK
    },
    Class {
        types: &["mistral4"],
        architectures: &["Mistral4ForCausalLM"],
        ..DEEPSEEK
    },
    Class {
        types: &["AXK1", "axk1"],
        architectures: &["AXK1ForCausalLM"],
        ..DEEPSEEK
    },
    Class {
        types: &["glm4_moe", "glm4v_moe_text"],
        architectures: &["Glm4MoeForCausalLM"],
        attention: Kind::Grouped,
        heads_default: false,
        ..DEEPSEEK
    },
    Class {
        types: &["dots1"],
        architectures: &["Dots1ForCausalLM"],
        attention: Kind::Grouped,
        heads_default: false,
        windows: Windows::Off,
        qk_norm: true,
        ..DEEPSEEK
    },
    Class {
        types: &["solar_open"],
        architectures: &["SolarOpenForCausalLM"],
        experts: Mixture::Routed(Shared::Count, DenseLayers::No),
        attention: Kind::Grouped,
        heads_default: false,
        head_dim: Some(128),
        ..DEEPSEEK
    },
    Class {
        types: &["bailing_moe", "bailing_moe_v2"],
        architectures: &["BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"],
        attention: Kind::Grouped,
        heads_default: false,
        ..DEEPSEEK
    },
    Class {
        types: &["exaone_moe"],
        architectures: &["ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"],
        attention: Kind::Grouped,
        windows: Windows::Every(4),
        heads_default: false,
        qk_norm: true,
        ..DEEPSEEK
    },
    Class {
        types: &["hy_v3"],
        architectures: &["HYV3ForCausalLM"],
        attention: Kind::Grouped,
        heads_default: false,
        head_dim: Some(128),
        qk_norm: true,
        ..DEEPSEEK
    },
    Class {
        types: &["hunyuan_v1_dense"],
        architectures: &["HunYuanDenseV1ForCausalLM"],
        heads_default: true,
        qk_norm: true,
        ..BASE
    },
    Class {
        types: &["hunyuan_v1_moe"],
        architectures: &["HunYuanMoEV1ForCausalLM"],
        experts: Mixture::Routed(Shared::Count, DenseLayers::No),
        qk_norm: true,
        ..BASE
    },
    Class {
        types: &["ernie4_5"],
        architectures: &["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"],
        head_dim: Some(128),
        tied: true,
        ..BASE
    },
    Class {
        types: &["ernie4_5_moe"],
        architectures: &["Ernie4_5_MoeForCausalLM"],
        experts: Mixture::Routed(Shared::Count, DenseLayers::Range),
        own_width: true,
        tied: true,
        ..BASE
    },
    Class {
        types: &["gpt_oss"],
        architectures: &["GptOssForCausalLM"],
        experts: Mixture::Routed(Shared::No, DenseLayers::No),
        windows: Windows::Every(2),
        head_dim: Some(64),
        ..BASE
    },
    Class {
        types: &["llama4", "llama4_text"],
        architectures: &["Llama4ForCausalLM"],
        experts: Mixture::Routed(Shared::One, DenseLayers::Interleaved),
        windows: Windows::Chunked,
        head_dim: Some(128),
        ..BASE
    },
    Class {
        types: &["minimax_m2"],
        architectures: &["MiniMaxM2ForCausalLM"],
        experts: Mixture::Routed(Shared::No, DenseLayers::No),
        head_dim: Some(128),
        qk_norm: true,
        ..BASE
    },
    Class {
        types: &["olmoe"],
        architectures: &["OlmoeForCausalLM"],
        experts: Mixture::Routed(Shared::No, DenseLayers::No),
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["phimoe"],
        architectures: &["PhiMoEForCausalLM", "PhimoeForCausalLM"],
        experts: Mixture::Routed(Shared::No, DenseLayers::No),
        windows: Windows::AllIfStated,
        ..BASE
    },
    Class {
        types: &["granite"],
        architectures: &["GraniteForCausalLM"],
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["granitemoe"],
        architectures: &["GraniteMoeForCausalLM"],
        experts: Mixture::Routed(Shared::No, DenseLayers::No),
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["granitemoeshared"],
        architectures: &["GraniteMoeSharedForCausalLM"],
        experts: Mixture::Routed(Shared::Width, DenseLayers::No),
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["granitemoehybrid"],
        architectures: &["GraniteMoeHybridForCausalLM"],
        experts: Mixture::SharedOrRouted,
        attention: Kind::StateSpace,
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["aria_text"],
        architectures: &["AriaTextForCausalLM"],
        experts: Mixture::Routed(Shared::Count, DenseLayers::No),
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["gemma"],
        architectures: &["GemmaForCausalLM"],
        head_dim: Some(256),
        tied: true,
        ..BASE
    },
    Class {
        types: &["gemma2"],
        architectures: &["Gemma2ForCausalLM"],
        windows: Windows::Every(2),
        head_dim: Some(256),
        window: Some(4096),
        heads: Some([8, 4]),
        tied: true,
        ..BASE
    },
    Class {
        types: &["gemma3", "gemma3_text"],
        architectures: &["Gemma3ForCausalLM"],
        windows: Windows::Every(6),
        head_dim: Some(256),
        window: Some(4096),
        heads: Some([8, 4]),
        tied: true,
        qk_norm: true,
        ..BASE
    },
    Class {
        types: &["cohere"],
        architectures: &["CohereForCausalLM"],
        heads_default: true,
        tied: true,
        ..BASE
    },
    Class {
        types: &["cohere2"],
        architectures: &["Cohere2ForCausalLM"],
        windows: Windows::Every(4),
        heads_default: true,
        tied: true,
        ..BASE
    },
    Class {
        types: &["glm", "glm4"],
        architectures: &["GlmForCausalLM", "Glm4ForCausalLM"],
        head_dim: Some(128),
        ..BASE
    },
    Class {
        types: &["glm4v_text"],
        architectures: &["Glm4ForCausalLM"],
        ..BASE
    },
    Class {
        types: &["olmo2"],
        architectures: &["Olmo2ForCausalLM"],
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["olmo3"],
        architectures: &["Olmo3ForCausalLM"],
        windows: Windows::Every(4),
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["exaone4", "exaone4_5_text"],
        architectures: &["Exaone4ForCausalLM"],
        windows: Windows::Every(4),
        qk_norm: true,
        ..BASE
    },
    Class {
        types: &["phi3"],
        architectures: &["Phi3ForCausalLM"],
        windows: Windows::AllIfStated,
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["seed_oss"],
        architectures: &["SeedOssForCausalLM"],
        head_dim: Some(128),
        ..BASE
    },
    Class {
        types: &["smollm3"],
        architectures: &["SmolLM3ForCausalLM"],
        windows: Windows::Off,
        tied: true,
        ..BASE
    },
    Class {
        types: &["stablelm"],
        architectures: &["StableLmForCausalLM"],
        ..BASE
    },
    Class {
        types: &["internlm2", "internlm3"],
        architectures: &["InternLM2ForCausalLM", "InternLM3ForCausalLM"],
        heads_default: true,
        ..BASE
    },
    Class {
        types: &["baichuan"],
        architectures: &["BaichuanForCausalLM", "BaiChuanForCausalLM"],
        heads_default: true,
        ..BASE
    },
];

/// Known architectures that `ModelShape` cannot express, with the reason.
const REFUSED: &[(&str, &[&str])] = &[
    (
        "state-space layers",
        &[
            "mamba",
            "mamba2",
            "falcon_mamba",
            "falcon_h1",
            "jamba",
            "bamba",
            "zamba",
            "zamba2",
            "nemotron_h",
            "nemotron_h_puzzle",
            "plamo2",
            "codestral_mamba",
            "nemotron_flash",
        ],
    ),
    (
        "recurrent layers",
        &["recurrent_gemma", "rwkv", "rwkv6", "rwkv7", "xlstm"],
    ),
    (
        "convolutional layers among the attention",
        &["lfm2", "lfm2_moe", "lfm3"],
    ),
    (
        "this kind of linear attention",
        &[
            "minimax",
            "minimax_text_01",
            "minimax_m1",
            "kimi_linear",
            "bailing_moe_linear",
            "bailing_hybrid",
            "olmo_hybrid",
        ],
    ),
    (
        "block-sparse attention",
        &["minimax_m3", "minimax_m3_vl", "minimax_m3_text"],
    ),
    (
        "attention that compresses its keys and values",
        &["deepseek_v4", "deepseek_v41"],
    ),
    (
        "layers of several sizes",
        &[
            "gemma3n",
            "gemma3n_text",
            "gemma4",
            "gemma4_text",
            "openelm",
            "nemotron-nas",
            "deci",
        ],
    ),
    (
        "two attentions in a layer, and experts that compute nothing",
        &["longcat_flash", "longcat_flash_ngram"],
    ),
    ("cross-attention layers", &["mllama", "mllama_text_model"]),
    (
        "an MLP without a gate",
        &[
            "gpt2",
            "gptj",
            "gpt_neox",
            "gpt_bigcode",
            "opt",
            "bloom",
            "falcon",
            "mpt",
            "phi",
            "starcoder2",
            "nemotron",
            "persimmon",
            "arcee",
            "apertus",
        ],
    ),
    (
        "an encoder before the decoder",
        &[
            "t5",
            "t5gemma",
            "t5gemma2",
            "bart",
            "mbart",
            "whisper",
            "m2m_100",
            "pegasus",
            "encoder-decoder",
        ],
    ),
];

/// Files that hold one of [`CLASSES`] in an object, next to encoders of other inputs: values of `model_type`, and of
/// `architectures`.
const AROUND: &[(&str, &str)] = &[
    ("aria", "AriaForConditionalGeneration"),
    ("aya_vision", "AyaVisionForConditionalGeneration"),
    ("cohere2_vision", "Cohere2VisionForConditionalGeneration"),
    ("deepseek_vl_v2", "DeepseekVLV2ForCausalLM"),
    ("exaone4_5", "Exaone4_5_ForConditionalGeneration"),
    ("gemma3", "Gemma3ForConditionalGeneration"),
    ("glm4v", "Glm4vForConditionalGeneration"),
    ("glm4v_moe", "Glm4vMoeForConditionalGeneration"),
    ("glm46v", "Glm46VForConditionalGeneration"),
    ("internvl", "InternVLForConditionalGeneration"),
    ("internvl_chat", "InternVLChatModel"),
    ("interns1", "InternS1ForConditionalGeneration"),
    ("kimi_k25", "KimiK25ForConditionalGeneration"),
    ("kimi_k25", "Kimi_K25ForConditionalGeneration"),
    ("kimi_vl", "KimiVLForConditionalGeneration"),
    ("lighton_ocr", "LightOnOCRForConditionalGeneration"),
    ("lighton_ocr", "LightOnOcrForConditionalGeneration"),
    ("llama4", "Llama4ForConditionalGeneration"),
    ("llava", "LlavaForConditionalGeneration"),
    ("llava_next", "LlavaNextForConditionalGeneration"),
    ("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
    ("mistral3", "Mistral3ForConditionalGeneration"),
    ("pixtral", "LlavaForConditionalGeneration"),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
];

/// The class of `model_type`.
pub(super) fn of_type(model_type: &str) -> Option<&'static Class> {
    CLASSES
        .iter()
        .find(|class| class.types.contains(&model_type))
}

/// Why `model_type` is refused, if it is known for that.
pub(super) fn refused(model_type: &str) -> Option<&'static str> {
    let mut known = REFUSED.iter();
    known.find_map(|(why, types)| types.contains(&model_type).then_some(*why))
}

/// The values of `architectures` of files of `model_type`, which hold a language model in an object of its own; none: unknown.
pub(super) fn around(model_type: &str) -> Vec<&'static str> {
    AROUND
        .iter()
        .filter(|(name, _)| *name == model_type)
        .map(|(_, class)| *class)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_one_meaning() {
        let mut names: Vec<&str> = CLASSES
            .iter()
            .flat_map(|class| class.types)
            .copied()
            .collect();
        names.extend(REFUSED.iter().flat_map(|(_, types)| *types));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        for class in CLASSES {
            assert!(!class.architectures.is_empty(), "{class:?}");
        }
    }
}
