//! The caller's buffers: registered once, written by transfers, at most one at a time per byte.

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use slipstream_base::sync::lock;

/// Why a part of a region cannot be leased.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The part exceeds the region.
    #[error("bytes {at} to {at}+{len} exceed a buffer of {bytes} bytes")]
    Beyond {
        /// Offset of the first byte.
        at: usize,
        /// Length in bytes.
        len: usize,
        /// Size of the region.
        bytes: usize,
    },
    /// A transfer uses the part. A retry succeeds after that transfer.
    #[error(
        "bytes {at} to {at}+{len} of a buffer are in use by a transfer; wait for its completion"
    )]
    InUse {
        /// Offset of the first byte.
        at: usize,
        /// Length in bytes.
        len: usize,
    },
}

/// Memory that transfers write to and read from: the store's own, or the caller's.
///
/// Access needs a [`Lease`]. Leases never overlap, so each has exclusive access to its bytes.
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
    /// Length of each lease, by its offset.
    leased: Mutex<BTreeMap<usize, usize>>,
    /// Keeps the memory valid.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the bytes are accessed only through leases, which do not overlap.
unsafe impl Send for Region {}
// SAFETY: as above; a lock guards the table of leases.
unsafe impl Sync for Region {}

impl Region {
    /// Allocates zeroed memory, in huge pages if the system has some.
    ///
    /// # Panics
    ///
    /// If there is no memory, as allocations do.
    pub fn new(bytes: usize) -> Arc<Region> {
        let owner = Mapping::new(bytes.max(1)).expect("memory for a region");
        // SAFETY: the memory is unmapped with its owner, is initially zero, and is accessed only
        // through the region.
        unsafe { Region::from_raw(owner.base, bytes, Box::new(owner)) }
    }

    /// Wraps memory of the caller, such as a tensor's.
    ///
    /// # Safety
    ///
    /// `base` points to `bytes` initialized bytes that stay valid while `owner` lives. The caller
    /// accesses them only while no transfer uses them: from a completion to the next submission.
    pub unsafe fn from_raw(
        base: NonNull<u8>,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Arc<Region> {
        Arc::new(Region {
            base,
            bytes,
            leased: Mutex::default(),
            _owner: owner,
        })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The address in this process.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Leases `len` bytes from offset `at`, until the lease is dropped.
    ///
    /// # Errors
    ///
    /// [`RegionError`] if they exceed the region or are leased.
    pub fn lease(self: &Arc<Self>, at: usize, len: usize) -> Result<Lease, RegionError> {
        let end = at.checked_add(len).filter(|&end| end <= self.bytes);
        let Some(end) = end else {
            let bytes = self.bytes;
            return Err(RegionError::Beyond { at, len, bytes });
        };
        if len > 0 {
            let mut leased = lock(&self.leased);
            // Leases do not overlap, so the last one that begins before our end has the largest
            // end.
            let before = leased.range(..end).next_back();
            if before.is_some_and(|(start, len)| start + len > at) {
                return Err(RegionError::InUse { at, len });
            }
            leased.insert(at, len);
        }
        Ok(Lease {
            region: Arc::clone(self),
            at,
            len,
        })
    }

    /// Copies to the region.
    ///
    /// # Errors
    ///
    /// As [`Region::lease`].
    pub fn write(self: &Arc<Self>, at: usize, bytes: &[u8]) -> Result<(), RegionError> {
        self.lease(at, bytes.len())?
            .bytes_mut()
            .copy_from_slice(bytes);
        Ok(())
    }

    /// Copies from the region.
    ///
    /// # Errors
    ///
    /// As [`Region::lease`].
    pub fn read(self: &Arc<Self>, at: usize, out: &mut [u8]) -> Result<(), RegionError> {
        out.copy_from_slice(self.lease(at, out.len())?.bytes());
        Ok(())
    }
}

/// The memory of [`Region::new`].
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the only access to the memory is to unmap it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> rustix::io::Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: a new mapping at an address of the kernel's choice overlaps none of ours.
        let base = unsafe { mmap_anonymous(anywhere, bytes, prot, MapFlags::PRIVATE) }?;
        // SAFETY: the mapping above. This is advice: if it is refused, nothing changes.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast()).expect("a mapping has an address other than 0");
        Ok(Mapping { base, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, once; the region has ended, and so have its
        // leases.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Exclusive access to some bytes of a region.
pub struct Lease {
    region: Arc<Region>,
    at: usize,
    len: usize,
}

impl Lease {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: inside the region, initialized as promised to `from_raw`, and no other lease
        // covers them. `self` is borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts(self.region.base.as_ptr().add(self.at), self.len) }
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.region.base.as_ptr().add(self.at), self.len) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.len > 0 {
            let leased = &self.region.leased;
            lock(leased).remove(&self.at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_do_not_overlap_and_stay_inside() {
        let region = Region::new(100);
        let a = region.lease(10, 10).unwrap();
        for (at, len, free) in [
            (0, 10, true),
            (0, 11, false),
            (15, 1, false),
            (19, 5, false),
            (20, 80, true),
            (0, 100, false),
            (15, 0, true),
        ] {
            assert_eq!(region.lease(at, len).is_ok(), free, "{at} {len}");
        }
        drop(a);
        let mut all = region.lease(0, 100).unwrap();
        all.bytes_mut()[99] = 7;
        assert_eq!(
            region.read(99, &mut [0]),
            Err(RegionError::InUse { at: 99, len: 1 })
        );
        drop(all);
        let mut last = [0];
        region.read(99, &mut last).unwrap();
        assert_eq!(last, [7]);
        for (at, len) in [(100, 1), (usize::MAX, 2), (0, 101)] {
            assert!(matches!(
                region.lease(at, len),
                Err(RegionError::Beyond { .. })
            ));
        }
    }
}
