//! Block sizes.

use super::StoreError;

/// Block sizes by group. The group's id is the last four bytes of a key (big-endian). A single
/// group does not appear in keys.
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

    /// The offset of each key's block in a buffer of blocks back to back, and the end of the last
    /// one.
    pub(super) fn offsets(&self, keys: &[Box<[u8]>]) -> Result<Vec<usize>, StoreError> {
        let mut end = 0;
        let mut offsets = vec![0];
        for key in keys {
            end += self.of(key).ok_or_else(|| StoreError::NoGroup {
                suffix: key[key.len().saturating_sub(4)..].into(),
                groups: self.groups.len(),
            })?;
            offsets.push(end);
        }
        Ok(offsets)
    }
}

/// Checks that a buffer is as long as the blocks at `offsets`.
pub(super) fn check_buffer(bytes: usize, offsets: &[usize]) -> Result<(), StoreError> {
    let wanted = offsets.last().copied().unwrap_or(0);
    if bytes == wanted {
        return Ok(());
    }
    Err(StoreError::Buffer {
        bytes,
        blocks: offsets.len() - 1,
        wanted,
    })
}
