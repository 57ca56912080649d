//! Writes a cluster file from the facts that running engines report.

use std::fmt::Write as _;

use slipstream_base::EngineKind;
use slipstream_base::text::{acts, foreign, grouped};
use slipstream_config::cluster::file;
use slipstream_config::doc::Doc;
use slipstream_config::preset;
use slipstream_os::files;
use slipstream_probe::{EngineFacts, Outcome, Parallel};

/// A cluster file of `engines`: one pool for all that are alike. Each key is one that
/// `slipstream simulate` accepts; the others, and unknown values, are comments.
/// `timing` replaces the section of step times.
///
/// # Errors
/// There is no engine, or they serve different models or have blocks of different sizes.
pub fn cluster_file(engines: &[EngineFacts], timing: Option<&str>) -> anyhow::Result<String> {
    let mut pools: Vec<(&EngineFacts, Vec<&str>)> = Vec::new();
    for facts in engines {
        match pools
            .iter_mut()
            .find(|(first, _)| may_share_pool(first, facts))
        {
            Some((_, urls)) => urls.push(&facts.url),
            None => pools.push((facts, vec![&facts.url])),
        }
    }
    let (first, _) = pools.first().ok_or_else(|| anyhow::anyhow!("no engine"))?;
    let model = |facts: &EngineFacts| facts.base_model().map(|model| model.id.clone());
    let sizes = |facts: &EngineFacts| facts.block_size;
    for (facts, _) in &pools {
        anyhow::ensure!(
            model(facts) == model(first),
            "{} serves {}, but {} serves {}; a cluster file has one model, so describe them apart",
            first.url,
            model(first).unwrap_or_else(|| "no model".into()),
            facts.url,
            model(facts).unwrap_or_else(|| "no model".into()),
        );
        anyhow::ensure!(
            sizes(facts).is_none() || sizes(first).is_none() || sizes(facts) == sizes(first),
            "{} has blocks of {} tokens, but {} of {}; a cluster file has one block size, so \
             start them with the same --block-size or describe them apart",
            first.url,
            sizes(first).unwrap_or_default(),
            facts.url,
            sizes(facts).unwrap_or_default(),
        );
    }
    let mut text = Draft::default();
    text.head(engines);
    text.model(first);
    let single = pools.len() == 1;
    for (at, (facts, urls)) in pools.iter().enumerate() {
        let name = if single {
            "main".into()
        } else {
            format!("{}-{at}", facts.kind)
        };
        text.pool(&name, facts, urls, timing);
    }
    text.router(engines);
    Ok(text.text)
}

/// Whether two engines may be workers of one pool.
fn may_share_pool(a: &EngineFacts, b: &EngineFacts) -> bool {
    let comparable = |facts: &EngineFacts| EngineFacts {
        url: String::new(),
        asked: Vec::new(),
        kv_events: Vec::new(),
        ..facts.clone()
    };
    comparable(a) == comparable(b)
}

/// A cluster file in the making, which is valid after each step.
#[derive(Default)]
struct Draft {
    text: String,
}

impl Draft {
    fn line(&mut self, line: impl AsRef<str>) {
        self.text.push_str(line.as_ref());
        self.text.push('\n');
    }

    /// Adds `key = value` with a comment, if the file is valid with it; else a comment with the
    /// error.
    fn key(&mut self, key: &str, value: &str, comment: &str) {
        let line = match comment {
            "" => format!("{key} = {value}\n"),
            _ => format!("{key} = {value}  # {comment}\n"),
        };
        match check(&format!("{}{line}", self.text)) {
            Ok(()) => self.text.push_str(&line),
            Err(why) => {
                let _ = writeln!(self.text, "# {key} = {value}: not supported here: {why}");
            }
        }
    }

    /// Adds a number, or a comment if it is not known.
    fn number(&mut self, key: &str, value: Option<u64>, unknown: &str) {
        match value {
            Some(value) => self.key(key, &value.to_string(), ""),
            None => self.line(format!("# {key}: {unknown}")),
        }
    }

    fn head(&mut self, engines: &[EngineFacts]) {
        self.line("# Written by `slipstream describe` from the answers of running engines:");
        for facts in engines {
            let version = facts.version.as_deref().unwrap_or("version not reported");
            self.line(format!(
                "#   {}: {}, {}",
                facts.url,
                engine(facts.kind),
                plain(version)
            ));
            let read = facts
                .asked
                .iter()
                .filter(|asked| asked.outcome == Outcome::Read);
            let read: Vec<&str> = read.map(|asked| asked.path).collect();
            self.line(format!("#     read: {}", read.join(", ")));
            for asked in &facts.asked {
                if let Outcome::Unreadable(_) | Outcome::Failed(_) = asked.outcome {
                    let outcome = plain(&asked.outcome.to_string());
                    self.line(format!("#     {}: {outcome}", asked.path));
                }
            }
        }
        self.line("# A key in a comment is not known; the default in docs/cluster-file.md holds.");
    }

    fn model(&mut self, facts: &EngineFacts) {
        self.line("\n[model]");
        let Some(model) = facts.base_model() else {
            self.line("# No model is listed: the name and shape are those of the default preset.");
            return;
        };
        self.key("name", &quoted(&model.id), "");
        // The served name is free: the weights are those of the root. A repository's name counts for a folder.
        let (known, origin) = match &model.root {
            None => (preset::model(&model.id), ""),
            Some(root) if preset::model(root).is_some() => (preset::model(root), ""),
            Some(root) if root.starts_with('/') && model.id.contains('/') => {
                (preset::model(&model.id), "by the served name")
            }
            Some(_) => (None, ""),
        };
        let root = model.root.as_deref().unwrap_or(&model.id);
        // A relative one is a repository's name, or starts at the engine's working directory.
        let folder = std::path::Path::new(root);
        let found = |name: &str| folder.is_absolute() && folder.join(name).is_file();
        if found("config.json") {
            self.key("config", &quoted(&format!("{root}/config.json")), "");
        } else if let Some(preset) = known {
            self.key("preset", &quoted(&preset.name), origin);
        } else {
            self.line(format!(
                "# The shape of {} is not known: set `preset` (slipstream presets) or `config` to its \
                 config.json.\n# Until then step times are those of the default preset.",
                plain(root)
            ));
        }
        if found("tokenizer.json") {
            self.key("tokenizer", &quoted(root), "");
        } else {
            self.line("# tokenizer: set it to a folder with the model's tokenizer.json, for exact lengths");
        }
        let adapters = facts
            .models
            .iter()
            .filter(|model| model.parent.is_some())
            .count();
        if adapters > 0 {
            self.line(format!(
                "# {adapters} LoRA adapters are served too: name them in `lora_adapters` of a pool to model them"
            ));
        }
    }

    fn pool(&mut self, name: &str, facts: &EngineFacts, urls: &[&str], timing: Option<&str>) {
        self.line(format!("\n[pool.{name}]"));
        let each = facts.workers.unwrap_or(1).max(1) as usize;
        let workers = (urls.len() * each).to_string();
        let comment = match each {
            1 => urls.join(", "),
            _ => format!("{each} behind each of {}", urls.join(", ")),
        };
        self.key("workers", &workers, &comment);
        self.line(format!("\n[pool.{name}.engine]"));
        let dev = match facts.kind {
            EngineKind::Vllm => "not reported; vLLM does with VLLM_SERVER_DEV_MODE=1",
            _ => "not reported",
        };
        let blocks = match facts.kind {
            EngineKind::LlamaCpp => "llama.cpp caches per slot, not per block",
            _ => "not reported",
        };
        self.number("block_size", facts.block_size.map(u64::from), blocks);
        match (facts.kv_blocks, facts.kv_blocks_max) {
            (Some(least), Some(most)) => {
                let comment = format!("the fewest of its ranks; the most has {most}");
                self.key("num_gpu_blocks", &least.to_string(), &comment);
            }
            (least, _) => self.number("num_gpu_blocks", least, blocks),
        }
        // The limit of tokens first: that of sequences may not exceed it.
        self.number(
            "max_num_batched_tokens",
            facts.max_num_batched_tokens.map(u64::from),
            dev,
        );
        self.number("max_num_seqs", facts.max_num_seqs.map(u64::from), dev);
        self.number(
            "max_model_len",
            facts.max_model_len.map(u64::from),
            "not reported",
        );
        for (key, value) in [
            ("enable_prefix_caching", facts.prefix_caching),
            ("enable_chunked_prefill", facts.chunked_prefill),
            ("async_scheduling", facts.async_scheduling),
        ] {
            match value {
                Some(value) => self.key(key, &value.to_string(), ""),
                None => self.line(format!("# {key}: not reported")),
            }
        }
        self.parallel(&facts.parallel, dev);
        if let Some(share) = facts.gpu_memory_utilization {
            self.key("gpu_memory_utilization", &format!("{share:?}"), "");
        }
        self.cache_dtype(facts.kv_cache_dtype.as_deref());
        self.features(name, facts);
        if let Some(timing) = timing {
            self.line(format!("\n{}", timing.trim_end()));
            return;
        }
        self.line(format!("\n[pool.{name}.engine.timing]"));
        self.weights(facts.quantization.as_deref().or(facts.dtype.as_deref()));
    }

    fn parallel(&mut self, of: &Parallel, dev: &str) {
        self.number("tensor_parallel_size", of.tensor.map(u64::from), dev);
        self.number("data_parallel_size", of.data.map(u64::from), dev);
        if let Some(stages @ 2..) = of.pipeline {
            self.key("pipeline_parallel_size", &stages.to_string(), "");
        }
        if let Some(size @ 2..) = of.expert {
            self.line(format!(
                "# experts are spread over {size} GPUs; this is not modelled"
            ));
        }
    }

    fn cache_dtype(&mut self, dtype: Option<&str>) {
        match dtype {
            None => self.line("# kv_cache_dtype: not reported"),
            Some(dtype @ ("auto" | "bf16" | "fp8")) => {
                self.key("kv_cache_dtype", &quoted(dtype), "");
            }
            Some("bfloat16" | "float16") => self.key("kv_cache_dtype", "\"bf16\"", ""),
            Some(dtype @ ("fp8_e4m3" | "fp8_e5m2")) => {
                self.key("kv_cache_dtype", "\"fp8\"", dtype);
            }
            Some(dtype) => self.line(format!(
                "# kv_cache_dtype: {} is not modelled",
                plain(dtype)
            )),
        }
    }

    /// What the times of steps depend on.
    fn weights(&mut self, dtype: Option<&str>) {
        self.line(
            "# gpu: engines do not report theirs. Set it (slipstream presets); until then step times \
             are those of the default.",
        );
        match dtype {
            None => self.line("# dtype: not reported"),
            Some("fp8") => self.key("dtype", "\"fp8\"", ""),
            Some("bfloat16" | "float16") => self.key("dtype", "\"bf16\"", ""),
            Some(other) => self.line(format!("# dtype: {} is not modelled", plain(other))),
        }
    }

    /// Speculative decoding and LoRA adapters.
    fn features(&mut self, pool: &str, facts: &EngineFacts) {
        if let Some(method) = &facts.speculation {
            let known = match method.to_ascii_lowercase() {
                word if word.contains("eagle") => Some("eagle"),
                word if word.contains("mtp") || word == "nextn" => Some("mtp"),
                word if word.contains("ngram") => Some("ngram"),
                word if word == "draft_model" || word == "standalone" => Some("draft_model"),
                _ => None,
            };
            self.line(format!("\n# [pool.{pool}.engine.speculation]"));
            self.line(format!(
                "# The engine speculates ({}). To model it, set `acceptance` too, which engines do not report.",
                plain(method)
            ));
            match known {
                Some(known) => self.line(format!("# method = {}", quoted(known))),
                None => self.line("# method: not modelled"),
            }
            match facts.speculative_tokens {
                Some(tokens) => self.line(format!("# num_speculative_tokens = {tokens}")),
                None => self.line("# num_speculative_tokens: not reported"),
            }
        }
        if let Some(most) = facts.max_loras {
            self.line(format!("\n[pool.{pool}.engine.lora]"));
            self.key("max_loras", &most.to_string(), "");
        }
    }

    fn router(&mut self, engines: &[EngineFacts]) {
        self.line("\n[router]");
        let publish = |facts: &&EngineFacts| !facts.kv_events.is_empty();
        let publishing = engines.iter().filter(publish).count();
        for source in engines.iter().flat_map(|facts| &facts.kv_events) {
            let replay = match &source.replay_endpoint {
                Some(endpoint) => format!("replay at {endpoint}"),
                None => "no replay".into(),
            };
            let endpoint = plain(&source.endpoint);
            self.line(format!(
                "# KV events of rank {}: {endpoint}, {}",
                source.rank,
                plain(&replay)
            ));
        }
        if publishing == engines.len() {
            self.key("kv_events", "true", "");
        } else {
            let engines = grouped(engines.len() as u64);
            let comment =
                format!("{publishing} of {engines} engines report a publisher of KV events");
            self.key("kv_events", "false", &comment);
        }
    }
}

/// Whether `text` is a cluster file; if not, its first error in one line.
fn check(text: &str) -> Result<(), String> {
    let doc = Doc::parse("cluster.toml", text.as_bytes());
    let read = file::read(doc, files::read);
    let error = read.map(|_| ()).map_err(|error| error.to_string());
    error.map_err(|error| {
        let first = error.lines().next().unwrap_or_default();
        let first = first.trim_start_matches("error: ");
        // Without the place, which is that of this draft.
        let place = first.splitn(4, ':').collect::<Vec<_>>();
        plain(place.last().unwrap_or(&first).trim())
    })
}

fn engine(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Vllm => "vLLM",
        EngineKind::Sglang => "SGLang",
        EngineKind::LlamaCpp => "llama.cpp",
        EngineKind::Slipstream => "Slipstream",
        EngineKind::OpenAi | EngineKind::Auto => "an OpenAI server of unknown kind",
    }
}

/// A TOML string, in which nothing acts on a terminal.
fn quoted(text: &str) -> String {
    // JSON's escapes are among TOML's, but for the solidus, which serde_json leaves alone.
    let json = serde_json::Value::from(text).to_string();
    let each = json.chars().map(|c| match c {
        c if acts(c) => format!("\\U{:08X}", u32::from(c)),
        c => c.to_string(),
    });
    each.collect()
}

/// Text of an engine for a comment: one line of limited length.
fn plain(text: &str) -> String {
    const CHARS_MAX: usize = 200;
    let shown: String = text.chars().take(CHARS_MAX).collect();
    foreign(&shown).into_owned()
}

#[cfg(test)]
mod tests {
    use slipstream_config::cluster::Cluster;
    use slipstream_probe::{KvEventSource, Parallel, ServedModel};

    use super::*;

    fn vllm() -> EngineFacts {
        EngineFacts {
            url: "http://gpu1:8000".into(),
            kind: EngineKind::Vllm,
            version: Some("0.33.0".into()),
            models: vec![ServedModel {
                id: "qwen".into(),
                max_model_len: Some(32_768),
                parent: None,
                root: Some("Qwen/Qwen3-32B".into()),
            }],
            block_size: Some(32),
            kv_blocks: Some(9_000),
            prefix_caching: Some(true),
            kv_cache_dtype: Some("fp8_e4m3".into()),
            gpu_memory_utilization: Some(0.92),
            max_model_len: Some(32_768),
            max_num_seqs: Some(300),
            max_num_batched_tokens: Some(16_384),
            chunked_prefill: Some(true),
            async_scheduling: Some(false),
            parallel: Parallel {
                tensor: Some(2),
                data: Some(1),
                ..Parallel::default()
            },
            kv_events: vec![KvEventSource {
                endpoint: "tcp://gpu1:5557".into(),
                ..KvEventSource::default()
            }],
            ..EngineFacts::default()
        }
    }

    fn read(text: &str) -> Cluster {
        let doc = Doc::parse("c.toml", text.as_bytes());
        file::read(doc, |path| std::fs::read(path)).expect(text).0
    }

    #[test]
    fn every_fact_is_in_the_cluster() {
        let cluster = read(&cluster_file(&[vllm()], None).unwrap());
        let engine = &cluster.pools[0].engine;
        assert_eq!(
            (&*cluster.model.name, &*cluster.model.preset),
            ("qwen", "qwen3-32b")
        );
        assert_eq!((engine.block_size, engine.num_gpu_blocks), (32, 9_000));
        assert_eq!(
            (engine.max_num_seqs, engine.max_num_batched_tokens),
            (300, 16_384)
        );
        assert_eq!(
            (engine.max_model_len, engine.tensor_parallel_size),
            (32_768, 2)
        );
        assert_eq!(engine.kv_cache_dtype.name(), "fp8");
        assert_eq!(engine.gpu_memory_utilization, 0.92);
        assert!(cluster.router.kv_events && engine.enable_prefix_caching);
        assert!(!engine.async_scheduling);
    }

    /// The weights decide, not the name under which they are served.
    #[test]
    fn the_preset_is_that_of_the_weights() {
        let preset = |id: &str, root: Option<&str>| {
            let facts = EngineFacts {
                models: vec![ServedModel {
                    id: id.into(),
                    root: root.map(str::to_owned),
                    ..ServedModel::default()
                }],
                ..vllm()
            };
            let text = cluster_file(&[facts], None).unwrap();
            let line = text.lines().find(|line| line.starts_with("preset"));
            line.map(str::to_owned)
        };
        let known = Some("preset = \"qwen3-8b\"".to_owned());
        assert_eq!(preset("llama-3.1-8b", Some("acme/secret-34b-AWQ")), None);
        assert_eq!(preset("llama-3.1-8b", Some("Qwen/Qwen3-8B")), known);
        assert_eq!(preset("Qwen/Qwen3-8B", None), known);
        assert_eq!(preset("llama-3.1-8b", Some("/none/there")), None);
        let by_name = preset("Qwen/Qwen3-8B", Some("/none/there")).unwrap();
        assert!(by_name.contains("# by the served name"), "{by_name}");
    }

    #[test]
    fn workers_ranks_and_features_are_not_lost() {
        let facts = EngineFacts {
            workers: Some(4),
            kv_blocks: Some(20_000),
            kv_blocks_max: Some(25_000),
            speculation: Some("eagle3".into()),
            speculative_tokens: Some(3),
            max_loras: Some(4),
            ..vllm()
        };
        let second = EngineFacts {
            url: "http://gpu2:8000".into(),
            ..facts.clone()
        };
        let text = cluster_file(&[facts, second], None).unwrap();
        for part in [
            "workers = 8  # 4 behind each of http://gpu1:8000, http://gpu2:8000",
            "num_gpu_blocks = 20000  # the fewest of its ranks; the most has 25000",
            "# The engine speculates (eagle3). To model it,",
            "# method = \"eagle\"\n# num_speculative_tokens = 3\n",
            "max_loras = 4\n",
        ] {
            assert!(text.contains(part), "{part} in:\n{text}");
        }
        let cluster = read(&text);
        let engine = &cluster.pools[0].engine;
        assert_eq!(cluster.pools[0].workers, 8);
        assert_eq!(engine.lora.map(|lora| lora.max_loras), Some(4));
        let odd = EngineFacts {
            speculation: Some("suffix".into()),
            ..vllm()
        };
        let text = cluster_file(&[odd], None).unwrap();
        assert!(text.contains("# method: not modelled"), "{text}");
    }

    #[test]
    fn what_is_not_known_is_said_and_not_invented() {
        let unknown = EngineFacts {
            url: "http://a:1".into(),
            models: vec![ServedModel {
                id: "odd \"name\"\n\u{7f}".into(),
                ..ServedModel::default()
            }],
            kv_cache_dtype: Some("nvfp4".into()),
            parallel: Parallel {
                pipeline: Some(4),
                ..Parallel::default()
            },
            ..EngineFacts::default()
        };
        let text = cluster_file(&[unknown], None).unwrap();
        for part in [
            "# The shape of odd \"name\"",
            "# block_size: not reported",
            "# num_gpu_blocks: not reported",
            "# max_num_seqs: not reported",
            "# gpu: engines do not report theirs",
            "# kv_cache_dtype: nvfp4 is not modelled",
            "pipeline_parallel_size = 4",
            "kv_events = false",
        ] {
            assert!(text.contains(part), "{part} in:\n{text}");
        }
        let cluster = read(&text);
        assert_eq!(cluster.model.name, "odd \"name\"\n\u{7f}");
        let default = read("");
        assert_eq!(
            cluster.pools[0].engine.block_size,
            default.pools[0].engine.block_size
        );
    }

    /// A number that an engine can have and a cluster file cannot.
    #[test]
    fn values_out_of_range_become_comments_with_the_reason() {
        let facts = EngineFacts {
            block_size: Some(4096),
            max_model_len: Some(4_000_000_000),
            ..vllm()
        };
        let text = cluster_file(&[facts], None).unwrap();
        assert!(
            text.contains("# block_size = 4096: not supported here: "),
            "{text}"
        );
        assert!(
            text.contains("# max_model_len = 4000000000: not supported here: "),
            "{text}"
        );
        assert_eq!(read(&text).pools[0].engine.num_gpu_blocks, 9_000);
    }

    #[test]
    fn equal_engines_are_workers_of_one_pool() {
        let other = |url: &str| EngineFacts {
            url: url.into(),
            ..vllm()
        };
        let bigger = EngineFacts {
            kv_blocks: Some(50_000),
            ..other("http://c:1")
        };
        let all = [vllm(), other("http://b:1"), bigger.clone()];
        let cluster = read(&cluster_file(&all, None).unwrap());
        let pools = cluster
            .pools
            .iter()
            .map(|pool| (pool.workers, pool.engine.num_gpu_blocks));
        assert_eq!(pools.collect::<Vec<_>>(), [(2, 9_000), (1, 50_000)]);

        let blocks = EngineFacts {
            block_size: Some(16),
            ..other("http://d:1")
        };
        let error = cluster_file(&[vllm(), blocks], None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("--block-size"), "{error}");
        let model = EngineFacts {
            models: Vec::new(),
            ..other("http://d:1")
        };
        let error = cluster_file(&[vllm(), model], None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("no model"), "{error}");
    }
}
