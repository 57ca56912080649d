//! The cluster file that every candidate starts from.

use std::path::{Path, PathBuf};

use anyhow::Context;
use slipstream_config::cluster::{Cluster, NetworkMode, file};
use slipstream_config::doc::{Diagnostics, Doc, Settings};
use slipstream_plan::axes::Axes;
use slipstream_plan::space::{self, Setting, Shape};
use slipstream_report::table::number;

use crate::files;
use crate::source::{ClusterSource, environment};

/// Keys that no axis of the search sets, but the search does, with what restricts each.
const SEARCHED: &[(&str, &str)] = &[
    ("pool.", "--gpus, --tensor-parallel and --max-gpus"),
    ("model.preset", "--model"),
    (
        "autoscale.",
        "a run of `slipstream simulate` or `sweep`, as a plan is for a fixed number of workers",
    ),
    (
        "event.",
        "a run of `slipstream simulate`, as a plan is for a cluster without faults",
    ),
];

/// Key of the host memory of a rank, in a table of its own.
pub(super) const HOST_MEMORY: &str = "engine.host_tier.gib";

/// Key of the length of drafts, in a table of its own.
pub(super) const DRAFT_TOKENS: &str = "engine.speculation.num_speculative_tokens";

/// A cluster file without pools, with its overrides.
#[derive(Debug)]
pub(super) struct Base {
    name: String,
    text: Vec<u8>,
    sets: Vec<String>,
    /// Description of the model as it was read.
    model_lines: Vec<String>,
    /// KV transfers are to take time, and the file says nothing of a network.
    adds_network: bool,
    /// `[autoscale]` stays for clusters that have it ([`Base::resolve_scaled`]).
    scales: bool,
    /// Candidates set their host memory: `[engine.host_tier]` is for those that have some.
    searches_memory: bool,
    /// Candidates set the length of their drafts: `[engine.speculation]` is for those that have some.
    searches_drafts: bool,
}

impl Base {
    /// Reads `cluster`, or starts from the defaults. `model`: a preset, or a `config.json`. `axes`: what the search sets.
    pub(super) fn read(
        source: &ClusterSource,
        model: Option<&str>,
        axes: &Axes,
    ) -> anyhow::Result<Base> {
        let scales = !axes.autoscale_min.is_empty();
        refuse_searched(&source.sets, axes)?;
        let text = source.content()?.unwrap_or_default();
        let mut sets = Vec::new();
        if let Some(model) = model {
            let path = Path::new(model);
            let is_json = path
                .extension()
                .is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
            let is_file = is_json || path.join("config.json").is_file();
            sets.push(if is_file {
                format!("--model: model.config={}", absolute(Path::new(model))?)
            } else {
                format!("--model: model.preset={model}")
            });
        }
        sets.extend(source.sets.iter().cloned());
        let mut base = Base {
            name: source.file_name(),
            text,
            sets,
            model_lines: Vec::new(),
            adds_network: false,
            scales,
            searches_memory: axes.sets_key(HOST_MEMORY),
            searches_drafts: axes.sets_key(DRAFT_TOKENS),
        };
        if let Some(pool) = Doc::parse(&base.name, &base.text)
            .tables_with("pool", "model")
            .first()
        {
            anyhow::bail!(
                "{}: pool `{pool}` has a model of its own (`[pool.{pool}.model]`), and a plan is for one model; plan for \
                 each by itself, with `[model]` or --model",
                base.name
            );
        }
        // Without any worker: only the model and the shared settings. A model that fits no default GPU is
        // no mistake yet, so the engine's size is left to the candidates.
        let (cluster, _) = base.resolve_plain()?;
        base.adds_network = cluster.network.mode == NetworkMode::None;
        base.model_lines = cluster.model.lines();
        // Relative paths start from the folder of the file; a written plan lies elsewhere.
        for (key, path) in [
            ("model.config", &cluster.model.config),
            ("model.tokenizer", &cluster.model.tokenizer),
        ] {
            if let Some(path) = path {
                base.sets.push(format!("{key}={}", absolute(path)?));
            }
        }
        Ok(base)
    }

    /// A note that parts of the file have no effect.
    pub(super) fn note_dropped(&self) -> Option<String> {
        let mut doc = Doc::parse(&self.name, &self.text);
        let dropped: Vec<&str> = [
            ("pool", "[pool]"),
            ("event", "[[event]]"),
            ("autoscale", "[autoscale]"),
        ]
        .into_iter()
        .filter(|(key, _)| !(self.scales && *key == "autoscale"))
        .filter_map(|(key, name)| doc.remove(key).then_some(name))
        .collect();
        (!dropped.is_empty()).then(|| {
            format!(
                "{} of {} {} left out: the plan has pools of its own, of a fixed size, and no faults",
                dropped.join(" and "),
                self.name,
                if dropped.len() > 1 { "are" } else { "is" }
            )
        })
    }

    /// Settings that the question leaves open, and their defaults, in words.
    pub(super) fn assumed(&self, shared: &Cluster) -> Vec<String> {
        let mut assumed = Vec::new();
        let stated = self.doc().keys("model");
        if !stated.iter().any(|key| key == "preset" || key == "config") {
            assumed.push(format!(
                "model {}, as neither --model nor --cluster names one",
                shared.model.name
            ));
        }
        if self.text.is_empty() {
            let transfers = if self.adds_network {
                format!(
                    "; KV transfers at {} Gbit/s per GPU",
                    number(shared.network.nic_bits_per_s / 1e9)
                )
            } else {
                String::new()
            };
            assumed.push(format!(
                "engines, router and network of docs/cluster-file.md, as there is no --cluster (vLLM with prefix \
                 caching{transfers})"
            ));
        }
        assumed
    }

    /// Names of the GPUs that the file defines.
    pub(super) fn gpus(&self) -> Vec<String> {
        self.doc().keys("gpu")
    }

    fn doc(&self) -> Doc {
        self.doc_with(false)
    }

    /// `scaled`: with `[autoscale]`.
    fn doc_with(&self, scaled: bool) -> Doc {
        let mut doc = Doc::parse(&self.name, &self.text);
        doc.remove("pool");
        doc.remove("event");
        if !scaled {
            doc.remove("autoscale");
        }
        environment(&mut doc);
        let of_scaling = |set: &&String| set.trim_start().starts_with("autoscale.");
        for set in self.sets.iter().filter(|set| scaled || !of_scaling(set)) {
            doc.set(set);
        }
        doc
    }

    /// The cluster with step times that need no memory for weights.
    fn resolve_plain(&self) -> Result<(Cluster, Settings), Diagnostics> {
        let mut doc = self.doc();
        // Keys of other kinds of step times would be refused beside this one.
        doc.remove("engine.timing");
        if self.searches_memory {
            doc.remove("engine.host_tier");
        }
        if self.searches_drafts {
            doc.remove("engine.speculation");
        }
        doc.set("engine.num_gpu_blocks=16777216");
        doc.set("engine.tensor_parallel_size=1");
        doc.set("engine.timing.kind=constant");
        doc.set("engine.timing.step_ns=1000000");
        file::read(doc, files::read)
    }

    /// Description of the model as it was read.
    pub(super) fn model_lines(&self) -> &[String] {
        &self.model_lines
    }

    /// The model and everything that candidates share.
    pub(super) fn shared(&self) -> anyhow::Result<Cluster> {
        Ok(self.resolve_plain()?.0)
    }

    /// The assignments of a candidate.
    pub(super) fn sets(&self, shape: &Shape, setting: &Setting, workers: u32) -> Vec<String> {
        let mut sets = space::sets(shape, setting, workers);
        if shape.prefill_share.is_some() && self.adds_network {
            sets.push("network.mode=flows".into());
        }
        sets
    }

    fn set(&self, doc: &mut Doc, shape: &Shape, setting: &Setting, workers: u32) {
        if shape.host_gib == Some(0.0) {
            doc.remove("engine.host_tier");
        }
        if shape.draft_tokens == Some(0) {
            doc.remove("engine.speculation");
        }
        for set in self.sets(shape, setting, workers) {
            doc.set(&set);
        }
    }

    /// The cluster of a candidate of up to `workers` workers, of which at least `workers_min` run; `None`: as many as the
    /// file says.
    pub(super) fn resolve_scaled(
        &self,
        shape: &Shape,
        setting: &Setting,
        workers_min: Option<u32>,
        workers: u32,
    ) -> Result<(Cluster, Settings), Diagnostics> {
        let mut doc = self.doc_with(true);
        self.set(&mut doc, shape, setting, workers);
        if let Some(workers_min) = workers_min {
            doc.set(&format!("autoscale.workers_min={workers_min}"));
        }
        file::read(doc, files::read)
    }

    /// The cluster of a candidate, and the origin of each value.
    pub(super) fn resolve(
        &self,
        shape: &Shape,
        setting: &Setting,
        workers: u32,
    ) -> Result<(Cluster, Settings), Diagnostics> {
        let mut doc = self.doc();
        self.set(&mut doc, shape, setting, workers);
        file::read(doc, files::read)
    }
}

fn absolute(path: &Path) -> anyhow::Result<String> {
    let path: PathBuf = std::path::absolute(path).with_context(|| format!("{}", path.display()))?;
    Ok(path.display().to_string())
}

/// Refuses overrides of keys that the search sets, and of prices.
fn refuse_searched(sets: &[String], axes: &Axes) -> anyhow::Result<()> {
    let mut searched = axes.keys();
    let others = SEARCHED.iter().map(|&(key, flag)| (key, flag.to_owned()));
    if axes.autoscale_min.is_empty() {
        searched.extend(others);
    } else {
        searched.push(("autoscale.workers_max", "--max-gpus".to_owned()));
        searched.extend(others.filter(|(key, _)| *key != "autoscale."));
    }
    for set in sets {
        let key = set.split('=').next().unwrap_or_default().trim();
        let is_set = |of: &str| key == of || of.ends_with('.') && key.starts_with(of);
        if let Some((_, flag)) = searched.iter().find(|(of, _)| is_set(of)) {
            anyhow::bail!("--set {set}: the search chooses `{key}`; restrict it with {flag}");
        }
        if let Some(gpu) = key.strip_prefix("prices.") {
            let value = set
                .split_once('=')
                .map_or("PRICE", |(_, value)| value.trim());
            anyhow::bail!(
                "--set {set}: prices are no part of a cluster file; write --price {gpu}={value}, or --prices FILE"
            );
        }
    }
    Ok(())
}
