//! The caller's buffers: registered once, written by transfers, never by two at a time.

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Some of a region is being written or read by a transfer, or does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// Beyond the end.
    #[error("bytes {at} to {at}+{len} of a buffer of {bytes} bytes do not exist")]
    Beyond {
        /// First byte.
        at: usize,
        /// Bytes from there.
        len: usize,
        /// Bytes of the region.
        bytes: usize,
    },
    /// In use. A retry helps once that transfer is done.
    #[error(
        "bytes {at} to {at}+{len} of a buffer are in use by a transfer; wait for its completion"
    )]
    InUse {
        /// First byte.
        at: usize,
        /// Bytes from there.
        len: usize,
    },
}

/// Memory that transfers write to and read from: the store's own, or the caller's.
///
/// Who wants some of it takes a [`Lease`]; leases never overlap, so each is all alone with its
/// bytes.
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
    /// Length by start of each lease.
    leased: Mutex<BTreeMap<usize, usize>>,
    /// Keeps the memory where it is.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the bytes are reached through leases alone, which do not overlap.
unsafe impl Send for Region {}
// SAFETY: as above; the table of leases is behind a lock.
unsafe impl Sync for Region {}

impl Region {
    /// New memory, zero, in large pages where the system has some.
    ///
    /// # Panics
    ///
    /// If there is no memory, as allocations do.
    pub fn new(bytes: usize) -> Arc<Region> {
        let owner = Mapping::new(bytes.max(1)).expect("memory for a region");
        // SAFETY: the memory is unmapped with its owner, is zero at first, and is not touched but
        // through the region.
        unsafe { Region::from_raw(owner.base, bytes, Box::new(owner)) }
    }

    /// Memory of the caller, such as a tensor's.
    ///
    /// # Safety
    ///
    /// `base` points to `bytes` initialized bytes that stay valid while `owner` lives. The caller
    /// touches them only where no transfer is under way: from a completion to the next submission.
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

    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its address in this process.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Takes `len` bytes from `at` on, until the lease is dropped.
    ///
    /// # Errors
    ///
    /// [`RegionError`] if they do not exist or are taken.
    pub fn lease(self: &Arc<Self>, at: usize, len: usize) -> Result<Lease, RegionError> {
        let end = at.checked_add(len).filter(|&end| end <= self.bytes);
        let Some(end) = end else {
            let bytes = self.bytes;
            return Err(RegionError::Beyond { at, len, bytes });
        };
        if len > 0 {
            let mut leased = self.leased.lock().unwrap_or_else(PoisonError::into_inner);
            // Leases do not overlap, so the last one that begins before our end reaches furthest.
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

// SAFETY: it does nothing with the memory but to unmap it at its end.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> rustix::io::Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing of ours.
        let base = unsafe { mmap_anonymous(anywhere, bytes, prot, MapFlags::PRIVATE) }?;
        // SAFETY: of the mapping just made. It is advice: a refusal changes nothing.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast()).expect("a mapping is not at address 0");
        Ok(Mapping { base, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, once; the region is at its end, and so are its
        // leases.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Some bytes of a region, to which this lease has exclusive access.
pub struct Lease {
    region: Arc<Region>,
    at: usize,
    len: usize,
}

impl Lease {
    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: inside the region, initialized by its maker's promise, and no other lease has
        // them; `self` is borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts(self.region.base.as_ptr().add(self.at), self.len) }
    }

    /// The bytes, to write to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.region.base.as_ptr().add(self.at), self.len) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.len > 0 {
            let leased = &self.region.leased;
            leased
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&self.at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_do_not_overlap_and_do_not_reach_beyond() {
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
