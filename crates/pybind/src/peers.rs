//! [`PeerKeys`] for Python, and this engine's description for its peers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use slipstream_kvindex::{Reach, digest};
use slipstream_kvstore::store::PeerKeys;
use slipstream_kvstore::{Address, Nixl, PeerDiscovery, PeerOptions, Profile};

use crate::groups::{Groups, all_hold};
use crate::keys::KeyMirror;
use crate::store::to_python;

/// Peers that a look-up compares in all groups: those that hold the most of one group.
const CANDIDATES: usize = 4;

/// Reads the `slipstream.identity` of this engine.
pub(crate) fn profile(identity: &BTreeMap<String, String>) -> PyResult<Profile> {
    let text = |name: &str| identity.get(name).cloned().unwrap_or_default();
    let number = |name: &str| -> PyResult<u32> {
        let value = text(name);
        value.parse().map_err(|_| {
            PyValueError::new_err(format!(
                "`{name}` of the identity is `{value}`, not a number"
            ))
        })
    };
    let (tp, pp, rank) = (
        number("tensor_parallel")?,
        number("pipeline_parallel")?,
        number("rank")?,
    );
    Ok(Profile {
        model: text("model"),
        weights: text("weights"),
        config: text("config"),
        hash_algo: text("hash_algorithm"),
        hash_seed: text("hash_seed"),
        block_size: number("block_size")?,
        block_bytes: number("block_bytes")?.into(),
        groups: text("groups"),
        layout: format!("{} (format {})", text("layout"), text("format")),
        dtype: format!("{}, cache {}", text("dtype"), text("kv_cache_dtype")),
        tp: (tp, rank % tp.max(1)),
        pp: (pp, rank / tp.max(1)),
    })
}

pub(crate) fn addresses(texts: &[String]) -> PyResult<Vec<Address>> {
    let parse = |text: &String| match text.parse() {
        Ok(address) => Ok(address),
        Err(error) => Err(PyValueError::new_err(format!("{error}"))),
    };
    texts.iter().map(parse).collect()
}

/// Peer discovery, if a folder is configured.
pub(crate) fn discovery(
    folder: Option<PathBuf>,
    engine: &str,
    identity: &BTreeMap<String, String>,
    nixl: bool,
) -> Option<PeerDiscovery> {
    let rank = identity.get("rank").and_then(|rank| rank.parse().ok());
    Some(PeerDiscovery {
        folder: folder?,
        engine: engine.to_owned(),
        rank: rank.unwrap_or(0),
        identity: identity.clone(),
        nixl,
    })
}

/// The keys of other engines; see `slipstream.vllm.scheduler.Peers`.
#[pyclass(module = "slipstream._native")]
pub(crate) struct Peers {
    peers: PeerKeys,
}

#[pymethods]
impl Peers {
    /// Follows the engines whose ranks have these addresses: `peers[rank][engine]`. `keys_max` is the
    /// maximum number of keys of all engines together, per rank.
    #[new]
    #[pyo3(signature = (
        *, identities, names, peers, keys_max, peers_dir=None, engine="", nixl=false
    ))]
    fn new(
        identities: Vec<BTreeMap<String, String>>,
        names: Vec<String>,
        peers: Vec<Vec<String>>,
        keys_max: usize,
        peers_dir: Option<PathBuf>,
        engine: &str,
        nixl: bool,
    ) -> PyResult<Peers> {
        let engines = peers.first().map_or(0, Vec::len);
        if identities.len() != peers.len()
            || names.len() != peers.len()
            || peers.is_empty()
            || peers.iter().any(|rank| rank.len() != engines)
        {
            return Err(PyValueError::new_err(
                "every rank needs one identity, name and address of each peer",
            ));
        }
        // All ranks name a peer by the address of its first rank.
        let called = peers[0].clone();
        let mut ranks = Vec::new();
        for ((identity, name), peers) in identities.iter().zip(names).zip(peers) {
            ranks.push(PeerOptions {
                name,
                profile: profile(identity)?,
                listen: Vec::new(),
                peers: called.iter().cloned().zip(addresses(&peers)?).collect(),
                nixl: Nixl::Keys,
                discovery: discovery(peers_dir.clone(), engine, identity, nixl),
            });
        }
        let peers = PeerKeys::start(ranks, keys_max).map_err(to_python)?;
        Ok(Peers { peers })
    }

    /// The peer that holds the longest unbroken prefix of `hashes[start:end]`, each with `suffix`, on every
    /// rank, and the length of that prefix.
    fn prefix(
        &self,
        hashes: &Bound<'_, PyList>,
        start: usize,
        end: usize,
        suffix: &[u8],
    ) -> PyResult<(String, usize)> {
        let (mut digests, mut key) = (Vec::new(), Vec::new());
        for at in start..end.min(hashes.len()) {
            let hash = hashes.get_item(at)?;
            key.clear();
            key.extend_from_slice(hash.cast::<PyBytes>()?.as_bytes());
            key.extend_from_slice(suffix);
            digests.push(digest(&key));
        }
        let candidates = self.peers.candidates(&digests);
        let best = candidates.first().filter(|best| best.blocks > 0);
        Ok(best.map_or((String::new(), 0), |best| {
            (best.name.to_string(), best.blocks)
        }))
    }

    /// The peer that adds the most to the blocks of this engine's ranks, `stored`, and the tokens of the hit
    /// with it: each block that the hit needs is held on each rank by this engine or the peer. `found` tokens
    /// and an empty name if no peer adds to `found`, which is the hit with this engine's own blocks.
    #[allow(clippy::too_many_arguments)]
    fn longest(
        &self,
        groups: &Groups,
        stored: Vec<PyRef<'_, KeyMirror>>,
        hashes: &Bound<'_, PyList>,
        start: usize,
        end: usize,
        found: usize,
    ) -> PyResult<(String, usize)> {
        let peers = &self.peers;
        if stored.len() != peers.ranks() {
            return Err(PyValueError::new_err(format!(
                "{} ranks here and {} of the peers",
                stored.len(),
                peers.ranks()
            )));
        }
        let shapes = groups.shapes.groups();
        let end = groups.end(hashes, end);
        // A group that needs every block selects the candidates.
        let leader = shapes.iter().position(|group| group.reach == Reach::All);
        let mut keys = groups.keys(hashes);
        let (mut own, mut digests) = (start, Vec::new());
        if let Some(leader) = leader {
            let mut leading = true;
            for block in shapes[leader].needed(start, end) {
                let Some(key) = keys.get(leader, block) else {
                    break;
                };
                leading = leading && all_hold(&stored, key);
                if leading {
                    own = (block + 1) * shapes[leader].block_tokens;
                } else {
                    digests.push(digest(key));
                }
            }
        }
        let (mut best, mut longest) = (None, found);
        for candidate in peers.candidates(&digests).into_iter().take(CANDIDATES) {
            if let Some(leader) = leader {
                let reach = own + candidate.blocks.min(digests.len()) * shapes[leader].block_tokens;
                if reach <= longest {
                    break; // the following candidates hold no more
                }
                if shapes.len() == 1 {
                    (best, longest) = (Some(Arc::clone(&candidate.name)), reach);
                    break;
                }
            }
            let hit = groups.shapes.longest(start, end, |group, block| {
                let Some(key) = keys.get(group, block) else {
                    return false;
                };
                let digest = digest(key);
                let mut ranks = stored.iter().enumerate();
                ranks.all(|(rank, own)| {
                    own.set().contains(key) || peers.holds(&candidate, rank, digest)
                })
            });
            if hit > longest {
                (best, longest) = (Some(candidate.name), hit);
            }
        }
        if let Some(error) = keys.error {
            return Err(error);
        }
        let name = best.map_or_else(String::new, |name| name.to_string());
        Ok((name, longest))
    }

    /// Whether for each peer the keys are known or it cannot be reached.
    fn is_settled(&self) -> bool {
        self.peers.is_settled()
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = PyDict::new(py);
        let (mut refused, mut errors) = (0, 0);
        for links in self.peers.links() {
            let stats = links.stats().transport;
            refused += stats.refused_total;
            errors += stats.key_errors_total;
        }
        counts.set_item("peer_refused", refused)?;
        counts.set_item("peer_message_errors", errors)?;
        if let Some(first) = self.peers.links().next() {
            let stats = first.stats();
            counts.set_item("peers_found", stats.found_total)?;
            counts.set_item("peers_left", stats.left_total)?;
        }
        Ok(counts)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.peers.close());
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        Python::attach(|py| self.close(py));
    }
}
