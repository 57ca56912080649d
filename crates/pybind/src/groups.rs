//! Look-ups of loadable blocks for a model with several layer groups; wraps
//! [`slipstream_kvindex::Groups`].

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use slipstream_base::width::to_u32;
use slipstream_kvindex::{Group, Reach};

use crate::keys::KeyMirror;

/// The blocks of each group that a hit needs, and their keys.
#[pyclass(module = "slipstream._native", frozen)]
pub(crate) struct Groups {
    pub(crate) shapes: slipstream_kvindex::Groups,
    /// Tokens per hash of a request.
    hash_tokens: usize,
}

/// Keys of a plan, for each group its first block and block count, and whether each key is held here.
type Plan<'py> = (Vec<Bound<'py, PyBytes>>, Vec<(usize, usize)>, Vec<bool>);

/// The keys of a request's blocks, computed one after the other.
pub(crate) struct Keys<'a, 'py> {
    groups: &'a Groups,
    hashes: &'a Bound<'py, PyList>,
    key: Vec<u8>,
    /// The error of a key that could not be computed; such a key counts as not held.
    pub(crate) error: Option<PyErr>,
}

impl Keys<'_, '_> {
    /// The key of a block: the hash of all tokens up to its end, and the group. Source: vLLM
    /// 0.33, `BlockHashListWithBlockSize` and `make_block_hash_with_group_id` in
    /// `vllm/v1/core/kv_cache_utils.py`.
    pub(crate) fn get(&mut self, group: usize, block: usize) -> Option<&[u8]> {
        let shape = &self.groups.shapes.groups()[group];
        let at = (block + 1) * shape.block_tokens / self.groups.hash_tokens - 1;
        let hash = self.hashes.get_item(at);
        match hash.and_then(|hash| Ok(hash.cast_into::<PyBytes>()?)) {
            Ok(hash) => {
                self.key.clear();
                self.key.extend_from_slice(hash.as_bytes());
                self.key.extend_from_slice(&to_u32(group).to_be_bytes());
                Some(&self.key)
            }
            Err(error) => {
                self.error.get_or_insert(error);
                None
            }
        }
    }
}

impl Groups {
    pub(crate) fn keys<'a, 'py>(&'a self, hashes: &'a Bound<'py, PyList>) -> Keys<'a, 'py> {
        Keys {
            groups: self,
            hashes,
            key: Vec::with_capacity(64),
            error: None,
        }
    }

    /// The number of tokens that have hashes, at most `end`.
    pub(crate) fn end(&self, hashes: &Bound<'_, PyList>, end: usize) -> usize {
        end.min(hashes.len() * self.hash_tokens)
    }
}

/// Whether all of `stored` hold the key.
pub(crate) fn all_hold(stored: &[PyRef<'_, KeyMirror>], key: &[u8]) -> bool {
    stored.iter().all(|mirror| mirror.set().contains(key))
}

#[pymethods]
impl Groups {
    /// `groups`: for each group its kind, tokens per block, and tokens of its window or chunk.
    #[new]
    fn new(groups: Vec<(String, usize, usize)>, hash_tokens: usize) -> PyResult<Groups> {
        let shape = |(kind, block_tokens, tokens): (String, usize, usize)| {
            let reach = match &kind[..] {
                "full" => Reach::All,
                "window" => Reach::Window(tokens),
                "chunk" => Reach::Chunk(tokens),
                _ => {
                    let text = format!("`{kind}` is not `full`, `window` or `chunk`");
                    return Err(PyValueError::new_err(text));
                }
            };
            if hash_tokens == 0 || block_tokens == 0 || !block_tokens.is_multiple_of(hash_tokens) {
                return Err(PyValueError::new_err(format!(
                    "blocks have {block_tokens} tokens, and hashes {hash_tokens}"
                )));
            }
            Ok(Group {
                block_tokens,
                reach,
            })
        };
        let shapes = groups
            .into_iter()
            .map(shape)
            .collect::<PyResult<Vec<_>>>()?;
        if shapes.is_empty() {
            return Err(PyValueError::new_err("no layer group"));
        }
        Ok(Groups {
            shapes: slipstream_kvindex::Groups::new(shapes),
            hash_tokens,
        })
    }

    /// Hits are multiples of this many tokens.
    #[getter]
    fn hit_tokens(&self) -> usize {
        self.shapes.hit_tokens()
    }

    /// Tokens of the longest hit up to `end`, of blocks that all of `stored` hold beyond the `start`
    /// tokens that are already present.
    fn longest(
        &self,
        stored: Vec<PyRef<'_, KeyMirror>>,
        hashes: &Bound<'_, PyList>,
        start: usize,
        end: usize,
    ) -> PyResult<usize> {
        let mut keys = self.keys(hashes);
        let found = self
            .shapes
            .longest(start, self.end(hashes, end), |group, block| {
                keys.get(group, block)
                    .is_some_and(|key| all_hold(&stored, key))
            });
        keys.error.map_or(Ok(found), Err)
    }

    /// The blocks that a hit of `end` tokens needs beyond `start`.
    fn plan<'py>(
        &self,
        stored: Vec<PyRef<'_, KeyMirror>>,
        hashes: &Bound<'py, PyList>,
        start: usize,
        end: usize,
    ) -> PyResult<Plan<'py>> {
        let (mut keys, mut parts, mut here) = (Vec::new(), Vec::new(), Vec::new());
        let mut made = self.keys(hashes);
        for (id, group) in self.shapes.groups().iter().enumerate() {
            let blocks = group.needed(start, end);
            parts.push((blocks.start, blocks.len()));
            for block in blocks {
                let Some(key) = made.get(id, block) else {
                    break;
                };
                here.push(all_hold(&stored, key));
                keys.push(PyBytes::new(hashes.py(), key));
            }
        }
        made.error.map_or(Ok((keys, parts, here)), Err)
    }
}
