//! A trie over bytes as a double array: one step is one addition and one comparison.

use slipstream_base::TokenId;
use slipstream_base::width::to_u32;

/// Maps byte strings to tokens; finds the longest that begins a text.
///
/// Node `n`'s child for byte `b` is cell `base[n] + b`, if that cell's `parent` is `n`. Source: Aoe,
/// "An efficient digital search algorithm by using a double-array structure", IEEE TSE 15(9), 1989.
pub(super) struct Trie {
    cells: Box<[Cell]>,
}

#[derive(Clone, Copy)]
struct Cell {
    base: u32,
    parent: u32,
    token: TokenId,
}

const NONE: u32 = u32::MAX;
const FREE: Cell = Cell {
    base: 0,
    parent: NONE,
    token: NONE,
};

impl Trie {
    /// The trie of `entries`, whose byte strings are distinct and not empty.
    pub(super) fn new<'a>(entries: impl Iterator<Item = (&'a [u8], TokenId)>) -> Trie {
        let mut sorted: Vec<(&[u8], TokenId)> = entries.collect();
        sorted.sort_unstable();
        let mut cells = vec![FREE; 512];
        // The root is its own parent, so that no child can be taken for its cell.
        cells[0].parent = 0;
        let mut first_free = 1;
        let mut todo = vec![(0u32, 0usize, &sorted[..])];
        while let Some((node, depth, entries)) = todo.pop() {
            let entries = match entries.split_first() {
                Some(((bytes, token), longer)) if bytes.len() == depth => {
                    cells[node as usize].token = *token;
                    longer
                }
                _ => entries,
            };
            if entries.is_empty() {
                continue;
            }
            let children: Vec<&[(&[u8], TokenId)]> =
                entries.chunk_by(|a, b| a.0[depth] == b.0[depth]).collect();
            let lowest = children[0][0].0[depth] as usize;
            let base = place(&mut cells, &mut first_free, lowest, |base, cells| {
                children
                    .iter()
                    .all(|child| cells[base + child[0].0[depth] as usize].parent == NONE)
            });
            cells[node as usize].base = to_u32(base);
            for child in children {
                let cell = base + child[0].0[depth] as usize;
                cells[cell].parent = node;
                todo.push((to_u32(cell), depth + 1, child));
            }
        }
        // A step from any base stays inside.
        cells.resize(cells.len() + 256, FREE);
        Trie {
            cells: cells.into(),
        }
    }

    /// The longest entry that `bytes` begins with, and its length.
    #[inline]
    pub(super) fn longest(&self, bytes: &[u8]) -> Option<(TokenId, usize)> {
        let mut node = 0u32;
        let mut base = self.cells[0].base;
        let mut found = None;
        for (at, &byte) in bytes.iter().enumerate() {
            let next = base + u32::from(byte);
            let cell = self.cells[next as usize];
            if cell.parent != node || next == 0 {
                break;
            }
            if cell.token != NONE {
                found = Some((cell.token, at + 1));
            }
            node = next;
            base = cell.base;
        }
        found
    }
}

/// The lowest base at which `fits`, so that the child for byte `lowest` takes a free cell. Grows
/// `cells` so that a base has 256 cells behind it.
fn place(
    cells: &mut Vec<Cell>,
    first_free: &mut usize,
    lowest: usize,
    fits: impl Fn(usize, &[Cell]) -> bool,
) -> usize {
    while cells[*first_free].parent != NONE {
        *first_free += 1;
        if *first_free + 256 >= cells.len() {
            cells.resize(cells.len() * 2, FREE);
        }
    }
    let mut cell = (*first_free).max(lowest + 1);
    loop {
        let base = cell - lowest;
        if base + 256 >= cells.len() {
            cells.resize(cells.len() * 2, FREE);
        }
        if cells[cell].parent == NONE && fits(base, cells) {
            return base;
        }
        cell += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn finds_what_a_search_through_all_finds(
            entries in prop::collection::btree_set(prop::collection::vec(0u8..4, 1..5), 1..60),
            text in prop::collection::vec(0u8..5, 0..8),
        ) {
            let entries: Vec<Vec<u8>> = entries.into_iter().collect();
            let trie = Trie::new(entries.iter().enumerate().map(|(i, e)| (&e[..], i as u32)));
            let naive = entries
                .iter()
                .enumerate()
                .filter(|(_, e)| text.starts_with(e))
                .max_by_key(|(_, e)| e.len())
                .map(|(i, e)| (i as u32, e.len()));
            prop_assert_eq!(trie.longest(&text), naive);
        }
    }
}
