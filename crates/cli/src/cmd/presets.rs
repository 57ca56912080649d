//! `slipstream presets`: the models and GPUs available in a cluster file.

use std::process::ExitCode;

use serde_json::{Value, json};
use slipstream_config::cluster::Dtype;
use slipstream_config::preset::{GPUS, Gpu, MODELS, ModelShape, board_power_w};
use slipstream_report::table::Table;

use crate::out;

/// Flags of `slipstream presets`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON, with the source of each preset
    #[arg(long)]
    json: bool,
}

/// Prints the presets.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    out::print(&if args.json { as_json()? } else { as_text() })?;
    Ok(ExitCode::SUCCESS)
}

fn as_text() -> String {
    let mut models = Table::new([
        "model", "params", "active", "layers", "hidden", "heads", "kv heads", "experts", "context",
        "KV/token",
    ]);
    for model in MODELS.iter() {
        models.row([
            model.name.to_string(),
            billions(model.params()),
            billions(model.active_params()),
            model.layers.to_string(),
            model.hidden_size.to_string(),
            model.attention_heads.to_string(),
            model.kv_heads.to_string(),
            model
                .experts
                .map_or("-".into(), |e| format!("{} of {}", e.per_token, e.count)),
            model.max_positions.to_string(),
            format!(
                "{:.0} KiB",
                model.kv_bytes_per_token_per_gpu(1, Dtype::Bf16) as f64 / 1024.0
            ),
        ]);
    }
    let mut gpus = Table::new([
        "gpu",
        "bf16 TFLOP/s",
        "fp8 TFLOP/s",
        "memory GiB",
        "memory GB/s",
        "link GB/s",
        "link",
    ]);
    for gpu in GPUS.iter() {
        gpus.row([
            gpu.name.to_string(),
            format!("{:.0}", gpu.bf16_flops / 1e12),
            gpu.fp8_flops
                .map_or("-".into(), |flops| format!("{:.0}", flops / 1e12)),
            format!("{:.1}", gpu.memory_bytes as f64 / f64::from(1 << 30)),
            format!("{:.0}", gpu.memory_bytes_per_s / 1e9),
            format!("{:.0}", gpu.link_bytes_per_s / 1e9),
            gpu.link.name().to_owned(),
        ]);
    }
    format!(
        "{}\n{}\nPeaks are dense; KV/token is bf16; links count one direction. Sources: --json\n",
        models.render(false),
        gpus.render(false),
    )
}

fn billions(params: u64) -> String {
    format!("{:.1}B", params as f64 / 1e9)
}

fn as_json() -> serde_json::Result<String> {
    let presets = json!({
        "models": MODELS.iter().map(model_json).collect::<Vec<_>>(),
        "gpus": GPUS.iter().map(gpu_json).collect::<Vec<_>>(),
    });
    Ok(serde_json::to_string_pretty(&presets)? + "\n")
}

fn model_json(model: &ModelShape) -> Value {
    json!({
        "name": model.name,
        "source": model.source,
        "params": model.params(),
        "active_params": model.active_params(),
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "tie_word_embeddings": model.tied_embeddings,
        "num_experts": model.experts.map(|e| e.count),
        "num_experts_per_tok": model.experts.map(|e| e.per_token),
        "moe_intermediate_size": model.experts.map(|e| e.intermediate_size),
        "kv_bytes_per_token_bf16": model.kv_bytes_per_token_per_gpu(1, Dtype::Bf16),
    })
}

fn gpu_json(gpu: &Gpu) -> Value {
    json!({
        "name": gpu.name,
        "title": gpu.title,
        "source": gpu.source,
        "bf16_flops": gpu.bf16_flops,
        "fp8_flops": gpu.fp8_flops,
        "memory_bytes": gpu.memory_bytes,
        "memory_bytes_per_s": gpu.memory_bytes_per_s,
        "link_bytes_per_s": gpu.link_bytes_per_s,
        "link": gpu.link.name(),
        "board_power_w": board_power_w(&gpu.name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_json_list_every_preset() {
        let text = as_text();
        let json: Value = serde_json::from_str(&as_json().unwrap()).unwrap();
        for (list, names) in [
            (
                "models",
                MODELS
                    .iter()
                    .map(|m| m.name.to_string())
                    .collect::<Vec<_>>(),
            ),
            ("gpus", GPUS.iter().map(|g| g.name.to_string()).collect()),
        ] {
            assert_eq!(json[list].as_array().unwrap().len(), names.len());
            for name in names {
                assert!(text.lines().any(|line| line.starts_with(&name)), "{name}");
                assert!(
                    json[list]
                        .as_array()
                        .unwrap()
                        .iter()
                        .any(|p| p["name"] == name.as_str()),
                    "{name}"
                );
            }
        }
    }
}
