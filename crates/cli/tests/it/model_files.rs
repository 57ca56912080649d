//! Descriptions of the model that commands print.

use crate::server::run;

const LOAD: [&str; 9] = [
    "--requests",
    "2",
    "--rate",
    "1",
    "--isl",
    "16",
    "--osl",
    "2",
    "--quiet",
];

#[test]
fn commands_say_what_they_read_of_the_model() {
    let preset = [
        "--set",
        "model.preset=qwen3-30b-a3b",
        "--set",
        "engine.timing.dtype=fp8",
    ];
    let simulate = [&["simulate"], &preset[..], &LOAD].concat();
    let sweep = [
        &["sweep", "--vary", "engine.max_num_seqs=8,16"],
        &preset[..],
        &LOAD,
    ]
    .concat();
    let plan = [
        "plan",
        "--model",
        "qwen3-30b-a3b",
        "--gpus",
        "h200-sxm",
        "--tensor-parallel",
        "1",
        "--max-gpus",
        "1",
    ];
    let plan = [
        &plan[..],
        &["--slo", "ttft=10s", "--price", "h200-sxm=1"],
        &LOAD,
    ]
    .concat();
    let cache = "96 KiB of KV cache per token";
    for (args, format) in [
        (simulate, "fp8, 31.2 GB"),
        (sweep, "fp8, 31.2 GB"),
        (plan, "bf16, 61.1 GB"),
    ] {
        let (code, out, err) = run(&args);
        assert_eq!(code, Some(0), "{err}");
        let line =
            format!("qwen3-30b-a3b: 48 layers, 30.5B parameters, 3.35B active, {format}, {cache}");
        assert_eq!(
            err.lines().filter(|found| **found == line).count(),
            1,
            "{err}"
        );
        assert!(!out.contains(&line), "{out}");
    }
}

#[test]
fn a_folder_is_read_with_the_files_beside_its_config() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny");
    std::fs::create_dir(&path).unwrap();
    let config = |more: &str| {
        format!(
            r#"{{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
            "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "vocab_size": 100, "max_position_embeddings": 512, "tie_word_embeddings": false{more}}}"#
        )
    };
    let model = format!("model.config={}", path.display());
    let simulate = || run(&[&["simulate", "--set", &model], &LOAD[..]].concat());
    std::fs::write(path.join("config.json"), config("")).unwrap();
    let (code, _, err) = simulate();
    assert_eq!(code, Some(0), "{err}");
    assert!(
        err.starts_with("tiny: 2 layers, 0.0865M parameters, bf16, "),
        "{err}"
    );

    std::fs::write(
        path.join("hf_quant_config.json"),
        r#"{"quantization": {"quant_algo": "FP8"}}"#,
    )
    .unwrap();
    let (_, _, err) = simulate();
    assert!(
        err.starts_with("tiny: 2 layers, 0.0865M parameters, fp8, "),
        "{err}"
    );

    // Two layers of 64 x (64 + 2 x 32 + 64 + 3 x 128) and two embeddings, in 16 bits: 173,056 bytes.
    let index = r#"{"metadata": {"total_size": 173056}, "weight_map": {"model.layers.1.mlp.up_proj.weight": "a"}}"#;
    std::fs::write(path.join("model.safetensors.index.json"), index).unwrap();
    let (code, _, err) = simulate();
    assert_eq!(code, Some(2), "{err}");
    assert!(
        err.contains("model.safetensors.index.json in the same folder says"),
        "{err}"
    );
    std::fs::remove_file(path.join("hf_quant_config.json")).unwrap();
    let (code, _, err) = simulate();
    assert_eq!(code, Some(0), "{err}");

    std::fs::write(
        path.join("config.json"),
        config(", \"moe_num_experts\": 64"),
    )
    .unwrap();
    let (code, _, err) = simulate();
    assert_eq!(code, Some(2), "{err}");
    assert!(
        err.contains("`moe_num_experts` = 64 may change size, compute or cache"),
        "{err}"
    );
}

/// A FIFO at a place where a file is read or written is refused by name, and waits for no other process.
#[test]
fn fifos_are_refused_instead_of_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    let made = |path: &std::path::Path| {
        let made = std::process::Command::new("mkfifo").arg(path).status();
        assert!(made.unwrap().success());
    };
    made(&fifo);
    let fifo = fifo.to_str().unwrap();
    let empirical = dir.path().join("workload.toml");
    let text = "requests = 3\nisl = { kind = \"empirical\", file = \"fifo\" }\nosl = 5\n";
    std::fs::write(&empirical, text).unwrap();
    let empirical = empirical.to_str().unwrap();
    for args in [
        &["simulate", "--trace", fifo][..],
        &["simulate", "--workload", empirical],
        &[&["simulate", "--out", fifo], &LOAD[..]].concat(),
        &[&["simulate", "--html", fifo], &LOAD[..]].concat(),
        &["net", "run", fifo],
    ] {
        let (code, _, err) = run(args);
        assert_eq!(code, Some(2), "{args:?}: {err}");
        assert!(
            err.contains("FIFO") && err.contains("fifo"),
            "{args:?}: {err}"
        );
    }

    // Files that nobody named.
    let config = r#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
        "max_position_embeddings": 512, "tie_word_embeddings": false}"#;
    for name in [
        "hf_quant_config.json",
        "quantize_config.json",
        "quant_config.json",
        "model.safetensors.index.json",
    ] {
        let model = dir.path().join(name.replace('.', "-"));
        std::fs::create_dir(&model).unwrap();
        std::fs::write(model.join("config.json"), config).unwrap();
        made(&model.join(name));
        let set = format!("model.config={}", model.display());
        let (code, _, err) = run(&[&["simulate", "--set", &set], &LOAD[..]].concat());
        assert_eq!(code, Some(2), "{err}");
        assert!(
            err.contains(name) && err.contains("not a regular file"),
            "{err}"
        );
        // A broken file is named as it is called.
        if name.starts_with("quant") {
            std::fs::remove_file(model.join(name)).unwrap();
            std::fs::write(model.join(name), "[").unwrap();
            let (_, _, err) = run(&[&["simulate", "--set", &set], &LOAD[..]].concat());
            assert!(
                err.contains(&format!("{name} in the same folder is not")),
                "{err}"
            );
        }
    }
}
