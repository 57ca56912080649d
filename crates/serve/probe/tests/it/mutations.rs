//! KV events with faults, through the wire format and the view, against a model of the engine's cache.
//!
//! The engine is of either kind: events as maps (vLLM, SGLang from 0.5.20) or positional arrays
//! (earlier ones), tokens alone or in pairs, with salts and adapters. Its batches are changed in ways
//! that keep their meaning, lose some of it, or lose it all. Then the view may lose blocks, but never
//! claims one that the engine does not hold; and blocks that no fault touched are still known.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Map, Value, json};
use slipstream_base::{BlockHash, KvOp, TokenId};
use slipstream_events::KvEventBatch;
use slipstream_probe::{KvMirror, MirrorOptions};

const SIZE: usize = 2;

/// A block of the engine by its content: salt, adapter, all tokens up to its end, and the next one
/// if the engine has pairs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Block {
    salt: Option<&'static str>,
    lora: Option<&'static str>,
    tokens: Vec<TokenId>,
    next: Option<TokenId>,
}

impl Block {
    fn ours(&self) -> BlockHash {
        let root = BlockHash::root("m", self.lora.unwrap_or(""), self.salt.unwrap_or(""));
        *root.chain(&self.tokens, SIZE as u32).last().unwrap()
    }
}

#[derive(Clone, Debug)]
struct Style {
    /// Events are arrays.
    positional: bool,
    /// Tokens are pairs.
    pairs: bool,
    /// The salt is an entry of `extra_keys` (vLLM) instead of `cache_salt` (SGLang).
    extra_keys: bool,
}

/// An engine's cache without copies, as SGLang's.
struct Engine {
    style: Style,
    hashes: HashMap<Block, i64>,
    held: Vec<Block>,
}

#[derive(Clone, Debug)]
enum Step {
    Compute {
        salt: Option<&'static str>,
        lora: Option<&'static str>,
        tokens: Vec<TokenId>,
    },
    Evict(Index),
    Clear,
}

impl Engine {
    fn hash(&mut self, block: &Block) -> i64 {
        let next = self.hashes.len() as i64 + 1;
        // Of both signs, as SGLang's.
        *self
            .hashes
            .entry(block.clone())
            .or_insert(next * 7_919 * (1 - 2 * (next % 2)))
    }

    /// Does a step. Returns its events, with the blocks that each stores or removes; `None`: all.
    fn step(&mut self, step: &Step) -> Vec<(Value, Option<Vec<Block>>)> {
        match step {
            Step::Compute { salt, lora, tokens } => self.compute(*salt, *lora, tokens),
            Step::Evict(_) if self.held.is_empty() => Vec::new(),
            Step::Evict(at) => {
                // A leaf, as an engine does: nothing that is held begins with it.
                let begins = |a: &Block, b: &Block| {
                    (a.salt, a.lora) == (b.salt, b.lora)
                        && a.tokens.len() < b.tokens.len()
                        && b.tokens.starts_with(&a.tokens)
                };
                let leaves: Vec<usize> = (0..self.held.len())
                    .filter(|&at| !self.held.iter().any(|of| begins(&self.held[at], of)))
                    .collect();
                let block = self.held.remove(leaves[at.index(leaves.len())]);
                let hash = self.hash(&block);
                let event = if self.style.positional {
                    json!(["BlockRemoved", [hash], "GPU"])
                } else {
                    json!({"type": "BlockRemoved", "block_hashes": [hash], "medium": "GPU"})
                };
                vec![(event, Some(vec![block]))]
            }
            Step::Clear => {
                self.held.clear();
                let event = if self.style.positional {
                    json!(["AllBlocksCleared"])
                } else {
                    json!({"type": "AllBlocksCleared"})
                };
                vec![(event, None)]
            }
        }
    }

    fn compute(
        &mut self,
        salt: Option<&'static str>,
        lora: Option<&'static str>,
        tokens: &[TokenId],
    ) -> Vec<(Value, Option<Vec<Block>>)> {
        let pairs = self.style.pairs;
        let usable = tokens.len() - usize::from(pairs && !tokens.is_empty());
        let full = usable / SIZE;
        let block = |end: usize| Block {
            salt,
            lora,
            tokens: tokens[..end * SIZE].to_vec(),
            next: pairs.then(|| tokens[end * SIZE]),
        };
        let from = (1..=full)
            .take_while(|&end| self.held.contains(&block(end)))
            .count();
        // A block behind one that is not held was evicted with it.
        let new: Vec<Block> = (from + 1..=full).map(block).collect();
        if new.is_empty() {
            return Vec::new();
        }
        let hashes: Vec<i64> = new.iter().map(|block| self.hash(block)).collect();
        let parent = (from > 0).then(|| self.hash(&block(from)));
        let places = from * SIZE..full * SIZE;
        let tokens: Vec<Value> = places
            .map(|at| {
                if pairs {
                    json!([tokens[at], tokens[at + 1]])
                } else {
                    json!(tokens[at])
                }
            })
            .collect();
        let keys = |at: usize| {
            let salt = salt.filter(|_| at == 0);
            let keys: Vec<&str> = lora.into_iter().chain(salt).collect();
            if keys.is_empty() {
                Value::Null
            } else {
                json!(keys)
            }
        };
        let event = if self.style.positional {
            let mut event = vec![
                json!("BlockStored"),
                json!(hashes),
                json!(parent),
                json!(tokens),
                json!(SIZE),
                Value::Null,
                json!("GPU"),
            ];
            if lora.is_some() {
                event.push(json!(lora));
            }
            if let Some(salt) = salt {
                event.push(json!({"cache_salt": salt}));
            }
            Value::Array(event)
        } else {
            let mut event = json!({
                "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
                "token_ids": tokens, "block_size": SIZE, "lora_id": null, "medium": "GPU",
            });
            if lora.is_some() {
                event["lora_name"] = json!(lora);
            }
            if self.style.extra_keys {
                event["extra_keys"] = (from..full).map(keys).collect();
            } else if salt.is_some() {
                event["cache_salt"] = json!(salt);
            }
            event
        };
        self.held.extend(new.iter().cloned());
        vec![(event, Some(new))]
    }
}

/// A change of an event on its way.
#[derive(Clone, Debug)]
enum Fault {
    /// None.
    Whole,
    /// Unknown fields, or positions behind all, and the map's fields in another order. The
    /// meaning stays.
    More(Vec<Value>),
    /// A value that only informs becomes another one.
    Uninformative(Value),
    /// A needed field is lost, or becomes something else.
    Lost(Index, Option<Value>),
    /// The event becomes something else.
    Replaced(Value),
    /// Another event, of an unknown type that says nothing about blocks, follows it.
    Followed(Value),
}

fn odd() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!({})),
        Just(json!({"a": [1, {"b": null}]})),
        Just(json!([[[]]])),
        Just(json!("text")),
        Just(json!(1.5)),
        Just(json!(true)),
        Just(json!(["x", {}])),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    let anything = || prop_oneof![odd(), Just(Value::Null), any::<i64>().prop_map(Value::from)];
    prop_oneof![
        12 => Just(Fault::Whole),
        3 => prop::collection::vec(anything(), 1..4).prop_map(Fault::More),
        2 => odd().prop_map(Fault::Uninformative),
        2 => (any::<Index>(), prop::option::of(odd())).prop_map(|(at, to)| Fault::Lost(at, to)),
        1 => anything().prop_map(Fault::Replaced),
        1 => odd().prop_map(Fault::Followed),
    ]
}

fn is_store(event: &Value) -> bool {
    event[0] == "BlockStored" || event["type"] == "BlockStored"
}

impl Fault {
    /// The events that arrive instead of `event`, and whether its meaning is kept.
    fn apply(&self, event: &Value) -> (Vec<Value>, bool) {
        let store = is_store(event);
        match (self, event.clone()) {
            (Fault::More(values), Value::Object(fields)) => {
                let mut out = Map::new();
                for (at, value) in values.iter().enumerate() {
                    out.insert(format!("a_new_field_{at}"), value.clone());
                }
                out.extend(fields.into_iter().rev());
                (vec![Value::Object(out)], true)
            }
            (Fault::More(values), Value::Array(mut items)) => {
                // Behind all positions that have a meaning.
                items.resize(if store { 16 } else { 6 }.max(items.len()), Value::Null);
                items.extend(values.iter().cloned());
                (vec![Value::Array(items)], true)
            }
            (Fault::Uninformative(value), Value::Object(mut fields)) => {
                for name in ["session_id", "locality", "ownership", "lookahead_token_ids"] {
                    if !(name.starts_with("look") && *value == json!("text")) {
                        fields.insert(name.into(), value.clone());
                    }
                }
                (vec![Value::Object(fields)], true)
            }
            (Fault::Lost(..), event)
                if event[0] == "AllBlocksCleared" || event["type"] == "AllBlocksCleared" =>
            {
                (vec![json!({})], false)
            }
            (Fault::Lost(at, to), Value::Object(mut fields)) => {
                let needed: &[&str] = if store {
                    &[
                        "block_hashes",
                        "parent_block_hash",
                        "token_ids",
                        "block_size",
                        "type",
                    ]
                } else {
                    &["block_hashes", "type"]
                };
                let name = needed[at.index(needed.len())];
                match to {
                    None => _ = fields.remove(name),
                    Some(to) => _ = fields.insert(name.into(), to.clone()),
                }
                (vec![Value::Object(fields)], false)
            }
            (Fault::Lost(at, to), Value::Array(mut items)) => {
                let needed = if store { 5 } else { items.len().min(2) };
                let at = at.index(needed);
                match to {
                    None => items.truncate(at),
                    Some(to) => items[at] = to.clone(),
                }
                (vec![Value::Array(items)], false)
            }
            // An unknown type without hashes says nothing about blocks: of a lost removal it would not be true.
            (Fault::Replaced(value), _) if value[0] == "x" => (vec![Value::Null], false),
            (Fault::Replaced(value), _) => (vec![value.clone()], false),
            (Fault::Followed(value), event) => {
                (vec![event, json!({"type": "Heartbeat", "at": value})], true)
            }
            (_, event) => (vec![event], true),
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    let salt = prop_oneof![4 => Just(None), 1 => Just(Some("s")), 1 => Just(Some("t"))];
    let lora = prop_oneof![5 => Just(None), 1 => Just(Some("l"))];
    let tokens = prop::collection::vec(0u32..3, 0..12);
    prop_oneof![
        8 => (salt, lora, tokens)
            .prop_map(|(salt, lora, tokens)| Step::Compute { salt, lora, tokens }),
        6 => any::<Index>().prop_map(Step::Evict),
        1 => Just(Step::Clear),
    ]
}

fn style() -> impl Strategy<Value = Style> {
    any::<(bool, bool, bool)>().prop_map(|(positional, pairs, extra_keys)| Style {
        positional,
        pairs,
        extra_keys,
    })
}

/// Applies changes as an index does.
fn apply(held: &mut HashSet<BlockHash>, ops: &[KvOp]) {
    for op in ops {
        match *op {
            KvOp::Stored { hash, .. } => assert!(held.insert(hash), "stored twice"),
            KvOp::Removed { hash } => assert!(held.remove(&hash), "removed, but not held"),
            KvOp::Cleared => held.clear(),
        }
    }
}

proptest! {
    #[test]
    fn the_view_never_claims_what_the_engine_does_not_hold(
        style in style(),
        steps in prop::collection::vec((step(), fault()), 1..40),
        batch in 1usize..4,
        ts in prop_oneof![Just(json!(1.5)), Just(json!(null)), Just(json!("now"))],
    ) {
        let mut engine = Engine { style, hashes: HashMap::new(), held: Vec::new() };
        let options = MirrorOptions { model: "m".into(), block_size: SIZE as u32, blocks_max: 1 << 12 };
        let mut mirror = KvMirror::new(options);
        let (mut held, mut ops) = (HashSet::new(), Vec::new());
        // Blocks whose events arrived whole since the last fault that may cost the view.
        let mut certain: HashSet<Block> = HashSet::new();
        for steps in steps.chunks(batch) {
            let mut events = Vec::new();
            for (step, fault) in steps {
                for (event, blocks) in engine.step(step) {
                    let (arrives, whole) = fault.apply(&event);
                    events.extend(arrives);
                    match blocks {
                        None => certain.clear(),
                        Some(blocks) if is_store(&event) && whole => certain.extend(blocks),
                        Some(_) if is_store(&event) => {
                            // Its blocks, and all that follow them, are not known; nor is the view if
                            // not even the type could be read.
                            certain.clear();
                        }
                        Some(blocks) => {
                            certain.retain(|block| !blocks.contains(block));
                            if !whole {
                                certain.clear();
                            }
                        }
                    }
                }
            }
            let payload = rmp_serde::to_vec_named(&(ts.clone(), events, 0)).unwrap();
            let read = KvEventBatch::decode(&payload).unwrap();
            ops.clear();
            let reading = mirror.apply(&read, &mut ops);
            prop_assert!(reading.unreadable <= reading.events);
            apply(&mut held, &ops);
            let there: HashSet<BlockHash> = engine.held.iter().map(Block::ours).collect();
            let claimed: Vec<_> = held.difference(&there).collect();
            prop_assert!(claimed.is_empty(), "{claimed:?} are not held\n{read:?}");
            prop_assert!(!mirror.is_unusable());
            for block in &certain {
                // Its prefix is known too, as a chain is matched from its beginning.
                let prefix = |of: &Block| {
                    (of.salt, of.lora) == (block.salt, block.lora)
                        && block.tokens.starts_with(&of.tokens) && of.tokens.len() < block.tokens.len()
                };
                let before = engine.held.iter().filter(|of| prefix(of));
                if before.clone().all(|of| certain.contains(of)) {
                    prop_assert!(held.contains(&block.ours()), "{block:?} is lost\n{read:?}");
                }
            }
        }
    }

    /// A batch cut or changed in any byte: the view is cleared, or it stays consistent and bounded.
    #[test]
    fn changed_bytes_leave_a_consistent_view(
        style in style(),
        steps in prop::collection::vec(step(), 1..20),
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 0..4),
        cut in prop::option::of(any::<Index>()),
    ) {
        let mut engine = Engine { style, hashes: HashMap::new(), held: Vec::new() };
        let options = MirrorOptions { model: "m".into(), block_size: SIZE as u32, blocks_max: 8 };
        let mut mirror = KvMirror::new(options);
        let mut held = HashSet::new();
        for step in &steps {
            let events: Vec<Value> = engine.step(step).into_iter().map(|(event, _)| event).collect();
            let mut payload = rmp_serde::to_vec_named(&(1.5, events, 0)).unwrap();
            for (at, to) in &changes {
                let at = at.index(payload.len());
                payload[at] = *to;
            }
            if let Some(cut) = cut {
                payload.truncate(cut.index(payload.len()));
            }
            let mut ops = Vec::new();
            match KvEventBatch::decode(&payload) {
                Ok(batch) => _ = mirror.apply(&batch, &mut ops),
                Err(_) => mirror.clear(&mut ops),
            }
            apply(&mut held, &ops);
            prop_assert!(mirror.held() <= 8);
            prop_assert_eq!(mirror.our_blocks(), held.len());
        }
    }
}
