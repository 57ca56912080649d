//! KV events of real engines: what they say about them at start, and the thread that follows them.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use slipstream_base::RankId;
use slipstream_config::cluster::Cluster;
use slipstream_frontend::upstream::EngineSpec;
use slipstream_probe::{
    AskError, Client, EngineFacts, KvCounters, KvEventSource, KvFollower, MirrorOptions, ask_client,
};
use slipstream_router::Fleets;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::cached::BLOCKS_DEFAULT;

/// Time limit of an engine's answers.
const ASK: Duration = Duration::from_secs(3);

/// Pause before an engine that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Blocks of an engine at most, as in a cluster file.
const BLOCKS_MAX: u64 = 1 << 24;

/// What is known of an engine whose events can be followed.
#[derive(Clone)]
struct Source {
    events: KvEventSource,
    /// Tokens per block.
    block_size: Option<u32>,
    kv_blocks: Option<u64>,
}

/// What engines said at start; `None`: no answer yet. At least one answered.
pub(super) struct Known {
    sources: Vec<Option<Source>>,
    /// Tokens per block that every engine's block is a multiple of.
    block_size: Option<u32>,
}

/// Asks the engines `specs`. The inner error is the reason why KV events cannot be used, as a clause.
pub(super) fn learn(
    cluster: &Cluster,
    specs: &[EngineSpec],
) -> anyhow::Result<Result<Known, String>> {
    if !cluster.router.kv_events {
        return Ok(Err("`router.kv_events` is false".into()));
    }
    if cluster.model.tokenizer.is_none() {
        return Ok(Err(
            "`model.tokenizer` does not name the model's tokenizer".into()
        ));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let model = &cluster.model.name;
    let answers = runtime.block_on(async {
        let mut asked = JoinSet::new();
        for (at, spec) in specs.iter().enumerate() {
            let (spec, model) = (spec.clone(), model.clone());
            asked.spawn(async move { (at, ask(&spec, &model).await) });
        }
        let mut answers = asked.join_all().await;
        answers.sort_by_key(|(at, _)| *at);
        answers
    });
    Ok(weigh(answers.into_iter().map(|(_, answer)| answer)))
}

fn weigh(answers: impl Iterator<Item = Result<Option<Source>, String>>) -> Result<Known, String> {
    let sources = answers.collect::<Result<Vec<_>, _>>()?;
    if sources.iter().all(Option::is_none) {
        return Err("no engine answered yet, so it is not known whether they publish any".into());
    }
    let sizes = sources.iter().flatten().filter_map(|of| of.block_size);
    Ok(Known {
        block_size: sizes.reduce(common_divisor),
        sources,
    })
}

fn common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// `None` if `spec` does not answer.
async fn ask(spec: &EngineSpec, model: &str) -> Result<Option<Source>, String> {
    let url = spec.url.to_string();
    let client = Client::new(&url, spec.api_key.as_deref(), None);
    let client = client.map_err(|error| error.to_string())?;
    match ask_client(&client, ASK).await {
        Ok(facts) if facts.models.is_empty() => Ok(None), // it is loading one
        Ok(facts) => {
            let source = source(facts, model).map_err(|why| format!("{url} {why}"))?;
            Ok(Some(source))
        }
        Err(AskError::Unreachable { .. }) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// The source of an engine's events; otherwise how the engine does not fit, as a predicate.
fn source(mut facts: EngineFacts, model: &str) -> Result<Source, String> {
    if !facts.models.iter().any(|of| of.id == model) {
        let listed: Vec<&str> = facts.models.iter().map(|of| of.id.as_str()).collect();
        return Err(format!(
            "lists {}, and `model.tokenizer` is for `{model}` (`model.name`)",
            listed.join(", ")
        ));
    }
    if facts.prefix_caching == Some(false) {
        return Err("has no prefix caching".into());
    }
    let ranks = facts.kv_events.len().max(facts.ranks() as usize);
    if ranks > 1 {
        return Err(format!(
            "has {ranks} data-parallel ranks, among which it chooses itself; run each as a server of its own"
        ));
    }
    let Some(events) = facts.kv_events.pop() else {
        return Err(
            "reports no publisher of KV events; start vLLM with --kv-events-config \
             '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\"}'"
                .into(),
        );
    };
    Ok(Source {
        events,
        block_size: facts.block_size,
        kv_blocks: facts.kv_blocks,
    })
}

impl Known {
    /// `cluster` with the engines' block size and numbers of blocks.
    pub(super) fn cluster(&self, cluster: &Cluster) -> anyhow::Result<Cluster> {
        let mut cluster = cluster.clone();
        let mut sources = self.sources.iter();
        for pool in &mut cluster.pools {
            let size = self.block_size.unwrap_or(pool.engine.block_size);
            anyhow::ensure!(
                size > 0,
                "an engine of pool `{}` reports blocks of 0 tokens",
                pool.name
            );
            pool.engine.block_size = size;
            let ours = |of: &Source| {
                let per_block = of.block_size.unwrap_or(size).div_ceil(size);
                Some(of.kv_blocks?.saturating_mul(per_block.into()))
            };
            let of_pool = sources.by_ref().take(pool.workers as usize);
            if let Some(blocks) = of_pool.flatten().filter_map(ours).max() {
                pool.engine.num_gpu_blocks = blocks.min(BLOCKS_MAX) as u32;
            }
        }
        Ok(cluster)
    }

    /// Follows every engine into `fleets`, which are those of `cluster`.
    pub(super) fn follow(
        self,
        cluster: &Cluster,
        specs: Vec<EngineSpec>,
        fleets: Fleets,
    ) -> std::io::Result<Following> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (stop, mut stopped) = watch::channel(false);
        let (model, block_size) = (cluster.model.name.clone(), fleets.serve.block_size());
        let of = |spec: &EngineSpec| (spec.url.to_string(), OnceLock::new());
        let counters: Engines = specs.iter().map(of).collect();
        let shared = counters.clone();
        let run = move || {
            runtime.block_on(async move {
                let mut following = JoinSet::new();
                for (at, (spec, known)) in specs.into_iter().zip(self.sources).enumerate() {
                    let (fleets, counters) = (fleets.clone(), shared.clone());
                    let options = MirrorOptions {
                        model: model.clone(),
                        block_size,
                        blocks_max: BLOCKS_DEFAULT as usize,
                    };
                    following.spawn(async move {
                        let source = match known {
                            Some(source) => source,
                            None => ask_on(&spec, &options.model).await,
                        };
                        let rank = RankId {
                            worker: spec.worker,
                            dp_rank: 0,
                        };
                        let blocks_max = source.kv_blocks.unwrap_or(BLOCKS_DEFAULT).min(BLOCKS_MAX);
                        let options = MirrorOptions {
                            blocks_max: blocks_max as usize,
                            ..options
                        };
                        let follower = KvFollower::new(source.events, rank, options);
                        let _ = counters[at].1.set(follower.counters()); // once per engine
                        // Its deltas are without gaps; what the index drops is counted there.
                        follower.run(move |delta| _ = fleets.on_kv(delta)).await
                    });
                }
                let _ = stopped.changed().await; // or its other half was dropped
            });
        };
        let thread = std::thread::Builder::new()
            .name("engine-kv".into())
            .spawn(run)?;
        Ok(Following {
            stop,
            thread: Some(thread),
            counters,
        })
    }
}

/// Asks an engine until its events can be followed.
async fn ask_on(spec: &EngineSpec, model: &str) -> Source {
    let mut said = false;
    loop {
        tokio::time::sleep(ASK_AGAIN).await;
        match ask(spec, model).await {
            Ok(Some(source)) => return source,
            Err(why) if !said => {
                said = true;
                tracing::warn!("the cache of an engine is not known, and counts as empty: {why}");
            }
            Ok(None) | Err(_) => {}
        }
    }
}

/// URL of each engine, and its counters once it is followed.
type Engines = Arc<[(String, OnceLock<Arc<KvCounters>>)]>;

/// Engines whose events are followed. That ends when it is dropped.
pub(super) struct Following {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    counters: Engines,
}

impl Following {
    pub(super) fn collector(&self) -> KvCollector {
        KvCollector(self.counters.clone())
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.stop.send(true); // an error: the thread has ended
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that follows KV events ended by panic");
        }
    }
}

/// Encodes the counters of all followers.
pub(super) struct KvCollector(Engines);

impl fmt::Debug for KvCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvCollector({} engines)", self.0.len())
    }
}

impl Collector for KvCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        type Of = fn(&KvCounters) -> u64;
        let gauges: [(&str, &str, Of); 3] = [
            ("kv_connected", "Whether its KV events are received", |c| {
                c.connected.load(Relaxed).into()
            }),
            (
                "kv_unusable",
                "Whether its hashes do not identify prefixes",
                |c| c.unusable.load(Relaxed).into(),
            ),
            ("kv_blocks", "The engine's blocks that are known", |c| {
                c.held_blocks.load(Relaxed)
            }),
        ];
        let counters: [(&str, &str, Of); 6] = [
            ("kv_batches", "Batches of KV events applied", |c| {
                c.batches.load(Relaxed)
            }),
            ("kv_gaps", "Gaps in the sequence of its KV events", |c| {
                c.gaps.load(Relaxed)
            }),
            ("kv_gaps_repaired", "Gaps repaired by replay", |c| {
                c.repaired.load(Relaxed)
            }),
            ("kv_unreadable", "Batches that could not be decoded", |c| {
                c.unreadable.load(Relaxed)
            }),
            ("kv_restarts", "Times that the view began anew", |c| {
                c.restarts.load(Relaxed)
            }),
            (
                "kv_skipped_blocks",
                "Stored blocks that could not be placed",
                |c| c.skipped_blocks.load(Relaxed),
            ),
        ];
        // An engine that is not followed yet has zeros.
        let none = Arc::default();
        let each = || {
            let all = self.0.iter();
            all.map(|(url, counters)| ([("engine", url.as_str())], counters.get().unwrap_or(&none)))
        };
        for (name, help, of) in gauges {
            let name = format!("slipstream_engine_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
            for (labels, counters) in each() {
                let value = of(counters) as f64;
                family.encode_family(&labels)?.encode_gauge(&value)?;
            }
        }
        for (name, help, of) in counters {
            let name = format!("slipstream_engine_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
            for (labels, counters) in each() {
                family
                    .encode_family(&labels)?
                    .encode_counter::<NoLabelSet, u64, f64>(&of(counters), None)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use slipstream_probe::ServedModel;

    use super::*;

    fn facts() -> EngineFacts {
        EngineFacts {
            models: vec![ServedModel {
                id: "m".into(),
                ..ServedModel::default()
            }],
            block_size: Some(32),
            kv_blocks: Some(100),
            kv_events: vec![KvEventSource::default()],
            ..EngineFacts::default()
        }
    }

    #[test]
    fn an_engine_that_does_not_fit_is_refused_with_the_reason() {
        assert!(source(facts(), "m").is_ok());
        let why = |facts, model| source(facts, model).err().unwrap();
        assert!(why(facts(), "other").contains("lists m"));
        let without = EngineFacts {
            kv_events: Vec::new(),
            ..facts()
        };
        assert!(why(without, "m").contains("--kv-events-config"));
        let uncached = EngineFacts {
            prefix_caching: Some(false),
            ..facts()
        };
        assert!(why(uncached, "m").contains("prefix caching"));
        let ranks = EngineFacts {
            kv_events: vec![KvEventSource::default(); 2],
            ..facts()
        };
        assert!(why(ranks, "m").contains("2 data-parallel ranks"));
    }

    #[test]
    fn blocks_of_the_router_divide_those_of_all_engines() {
        let of = |block_size| {
            let facts = EngineFacts {
                block_size,
                ..facts()
            };
            source(facts, "m").map(Some)
        };
        let sized = |sizes: &[Option<u32>]| weigh(sizes.iter().map(|&size| of(size)));
        let size = |sizes| sized(sizes).ok().unwrap().block_size;
        assert_eq!(size(&[Some(32), Some(48), None]), Some(16));
        assert_eq!(size(&[Some(32)]), Some(32));
        assert_eq!(size(&[None]), None);
        assert!(weigh([Ok(None), Ok(None)].into_iter()).is_err());
        assert!(weigh([of(None), Err("x".into())].into_iter()).is_err());
        let known = weigh([of(Some(32)), Ok(None), of(Some(16))].into_iter());
        let mut cluster = Cluster::default();
        cluster.pools[0].workers = 3;
        let cluster = known.ok().unwrap().cluster(&cluster).unwrap();
        let engine = &cluster.pools[0].engine;
        assert_eq!((engine.block_size, engine.num_gpu_blocks), (16, 200));
    }
}
