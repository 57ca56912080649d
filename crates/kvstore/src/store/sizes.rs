//! How many bytes a block has.

use super::StoreError;

/// Bytes of blocks by their group, whose id is the last four bytes of a key (big-endian). Of one
/// group alone nothing is asked of the key.
#[derive(Clone, Debug)]
pub(super) struct BlockSizes {
    groups: Vec<usize>,
    pub(super) largest: usize,
}

impl BlockSizes {
    pub(super) fn new(groups: Vec<usize>) -> Result<BlockSizes, StoreError> {
        match groups.iter().max() {
            Some(&largest) if !groups.contains(&0) => Ok(BlockSizes { groups, largest }),
            _ => Err(StoreError::NoBlockBytes),
        }
    }

    fn of(&self, key: &[u8]) -> Option<usize> {
        if let &[only] = &self.groups[..] {
            return Some(only);
        }
        let group = u32::from_be_bytes(*key.last_chunk()?);
        self.groups.get(group as usize).copied()
    }

    /// Where each key's block begins in a buffer of blocks one after the other, and where the last
    /// one ends.
    pub(super) fn places(&self, keys: &[Box<[u8]>]) -> Result<Vec<usize>, StoreError> {
        let mut end = 0;
        let mut places = vec![0];
        for key in keys {
            end += self.of(key).ok_or_else(|| StoreError::NoGroup {
                suffix: key[key.len().saturating_sub(4)..].into(),
                groups: self.groups.len(),
            })?;
            places.push(end);
        }
        Ok(places)
    }
}

/// Checks that a buffer is as long as the blocks at `places`.
pub(super) fn check_buffer(bytes: usize, places: &[usize]) -> Result<(), StoreError> {
    let wanted = places.last().copied().unwrap_or(0);
    if bytes == wanted {
        return Ok(());
    }
    Err(StoreError::Buffer {
        bytes,
        blocks: places.len() - 1,
        wanted,
    })
}
