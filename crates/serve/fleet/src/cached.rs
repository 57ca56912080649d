//! The cached part of a prompt on one engine, derived from its KV events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::Context;
use serde_json::{Value, json};
use slipstream_base::width::{to_u16, to_usize};
use slipstream_base::{BlockHash, RankId, TokenId, WorkerId};
use slipstream_kvindex::BlockIndex;
use slipstream_probe::{EngineFacts, KvCounters, KvFollower, MirrorOptions};

use crate::engine_kv::{BLOCKS_DEFAULT, BLOCKS_MAX};

/// Blocks of the index at most: 64 ranks of [`BLOCKS_DEFAULT`].
const INDEX_BLOCKS_MAX: u64 = 64 * BLOCKS_DEFAULT;

/// The cache of one engine, as its KV events describe it.
pub struct CacheView {
    model: String,
    /// Tokens per block of the index.
    block_size: u32,
    index: Arc<BlockIndex>,
    /// By rank.
    counters: BTreeMap<u32, Arc<KvCounters>>,
}

impl CacheView {
    /// Follows every rank of an engine, in tasks of the current runtime. `block_size`: tokens per block of the index;
    /// `None`: the engine's.
    ///
    /// # Errors
    /// The engine publishes no KV events, or does not report its block size or a model.
    pub fn follow(facts: &EngineFacts, block_size: Option<u32>) -> anyhow::Result<CacheView> {
        anyhow::ensure!(
            !facts.kv_events.is_empty(),
            "{} reports no publisher of KV events; start vLLM with --kv-events-config \
             '{{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\"}}'",
            facts.url
        );
        let size = block_size.or(facts.block_size);
        let size = size.context("the engine does not report its block size; use --block-size")?;
        let model = facts.base_model().map(|model| model.id.clone());
        let model = model.context("the engine lists no model")?;
        let (index, counters) = follow(facts, &model, size);
        Ok(CacheView {
            model,
            block_size: size,
            index,
            counters,
        })
    }

    /// Number of ranks that are followed.
    pub fn ranks(&self) -> usize {
        self.counters.len()
    }

    /// The answer to a prompt, a JSON object with `tokens` and optional `lora` and `salt`: its cached tokens at each rank.
    ///
    /// # Errors
    /// What is wrong with the prompt.
    pub fn cached(&self, line: &str) -> Result<Value, String> {
        let prompt = prompt(line)?;
        Ok(answer(
            &prompt,
            &self.model,
            self.block_size,
            &self.index,
            &self.counters,
        ))
    }
}

/// A line of the input.
struct Prompt {
    tokens: Vec<TokenId>,
    lora: String,
    salt: String,
}

/// Blocks of the index for `ranks` ranks of `blocks` blocks each, of which every one is `ours_each` of the index's.
/// All are numbers of the engine.
fn capacity(ranks: usize, blocks: u64, ours_each: u32) -> usize {
    let all = (ranks as u64)
        .saturating_mul(blocks)
        .saturating_mul(ours_each.into());
    to_usize(all.min(INDEX_BLOCKS_MAX))
}

/// Followers of every rank, and the index that they feed: one target per rank.
fn follow(
    facts: &EngineFacts,
    model: &str,
    size: u32,
) -> (Arc<BlockIndex>, BTreeMap<u32, Arc<KvCounters>>) {
    let blocks = facts.kv_blocks.unwrap_or(BLOCKS_DEFAULT).min(BLOCKS_MAX);
    let ours_each = facts.block_size.unwrap_or(size).div_ceil(size);
    let ranks = facts.kv_events.len();
    let index = Arc::new(BlockIndex::new(ranks, capacity(ranks, blocks, ours_each)));
    let mut counters = BTreeMap::new();
    for (target, source) in facts.kv_events.iter().enumerate() {
        let rank = RankId {
            worker: WorkerId(0),
            dp_rank: to_u16(source.rank),
        };
        let options = MirrorOptions {
            model: model.to_owned(),
            block_size: size,
            blocks_max: to_usize(blocks),
        };
        let follower = KvFollower::new(source.clone(), rank, options);
        counters.insert(source.rank, follower.counters());
        let index = Arc::clone(&index);
        tokio::spawn(follower.run(move |delta| {
            index.apply(target, delta);
        }));
    }
    (index, counters)
}

fn prompt(line: &str) -> Result<Prompt, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("not JSON: {error}"))?;
    let tokens = value.get("tokens").and_then(Value::as_array);
    let tokens = tokens.ok_or("no array `tokens`")?.iter();
    let tokens = tokens.map(|token| TokenId::try_from(token.as_u64()?).ok());
    let text = |name: &str| match value.get(name) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(format!("`{name}` is not a text")),
    };
    Ok(Prompt {
        tokens: tokens
            .collect::<Option<_>>()
            .ok_or("`tokens` has an entry that is no token")?,
        lora: text("lora")?,
        salt: text("salt")?,
    })
}

fn answer(
    prompt: &Prompt,
    model: &str,
    size: u32,
    index: &BlockIndex,
    counters: &BTreeMap<u32, Arc<KvCounters>>,
) -> Value {
    let root = BlockHash::root(model, &prompt.lora, &prompt.salt);
    let blocks = root.chain(&prompt.tokens, size);
    let mut hits = vec![0; counters.len()];
    index.overlap(&blocks, &mut hits);
    let ranks = counters.iter().zip(hits).map(|((rank, counters), hit)| {
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "rank": rank,
            "cached_tokens": hit * size,
            "blocks": count(&counters.our_blocks),
            "batches": count(&counters.batches),
            "connected": counters.connected.load(Ordering::Relaxed),
            "gaps": count(&counters.gaps),
            "lost_batches": count(&counters.lost_batches),
            "skipped_blocks": count(&counters.skipped_blocks),
            "other_blocks": count(&counters.other_blocks),
            "unreadable_events": count(&counters.unreadable_events),
            "useless": counters.useless.load(Ordering::Relaxed),
        })
    });
    json!({"prompt_tokens": prompt.tokens.len(), "ranks": ranks.collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_s_numbers_do_not_exceed_the_index() {
        assert_eq!(capacity(2, 1_000, 4), 8_000);
        for (ranks, blocks, ours_each) in [(1, u64::MAX, 1), (1024, 1 << 24, u32::MAX)] {
            assert_eq!(capacity(ranks, blocks, ours_each), 1 << 26);
        }
    }

    #[test]
    fn lines_are_prompts_or_errors() {
        let prompt = prompt(r#"{"tokens": [1, 4294967295], "salt": "s"}"#)
            .ok()
            .unwrap();
        assert_eq!(
            (prompt.tokens, prompt.lora.as_str()),
            (vec![1, u32::MAX], "")
        );
        assert_eq!(prompt.salt, "s");
        for (line, part) in [
            ("x", "not JSON"),
            ("{}", "`tokens`"),
            (r#"{"tokens": [-1]}"#, "no token"),
            (r#"{"tokens": [4294967296]}"#, "no token"),
            (r#"{"tokens": [], "salt": 1}"#, "`salt`"),
        ] {
            let error = super::prompt(line).err().unwrap();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
