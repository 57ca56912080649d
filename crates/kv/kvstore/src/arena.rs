//! Shared memory that other processes of the host can map and read.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use crate::copy::{copy, copy_hashed};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use slipstream_base::width::to_usize;

/// Why shared memory cannot be created or mapped.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The host has less memory than requested. Nothing was allocated.
    #[error(
        "{bytes} bytes of shared memory requested, and only {limit} available ({what}); give the \
         host tier fewer bytes or raise the limit"
    )]
    Limit {
        /// Bytes requested.
        bytes: u64,
        /// Bytes available.
        limit: u64,
        /// The limit that applies.
        what: &'static str,
    },
    /// A system call failed.
    #[error("{bytes} bytes of shared memory cannot be allocated: {call} failed")]
    System {
        /// Bytes requested.
        bytes: u64,
        /// The system call that failed.
        call: &'static str,
        /// The error it returned.
        source: Errno,
    },
    /// A peer's memory could shrink while it is read, or is smaller than announced.
    #[error(
        "a peer's shared memory is refused: {why}; run one release of slipstream on both sides"
    )]
    Peer {
        /// The reason.
        why: String,
    },
}

/// Shared memory of a fixed size. All pages are allocated at the start, so that a first touch
/// during a transfer cannot fail.
///
/// It has no name in any file system. It is freed when the last process closes it.
pub struct Arena {
    fd: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread; callers of `bytes` and `bytes_mut` ensure that reads
// and writes do not overlap.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Allocates `bytes` bytes of zeroed memory.
    ///
    /// # Errors
    ///
    /// [`ArenaError::Limit`] and [`ArenaError::System`].
    pub fn create(bytes: usize) -> Result<Arena, ArenaError> {
        let asked = bytes as u64;
        let system = |call| move |source| refusal(asked, call, source);
        // Without this check the OOM killer would end a process later.
        if let Some(limit) = memory_available()
            && limit < asked
        {
            return Err(ArenaError::Limit {
                bytes: asked,
                limit,
                what: "MemAvailable of /proc/meminfo",
            });
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd =
            rustix::fs::memfd_create("slipstream-kv", flags).map_err(system("memfd_create"))?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, asked)
            .map_err(system("fallocate"))?;
        let base = map(&fd, bytes, ProtFlags::READ | ProtFlags::WRITE).map_err(system("mmap"))?;
        let arena = Arena { fd, base, bytes };
        // Sealed after our own mapping, which stays writable. A process that receives the
        // descriptor can only read, and the memory cannot shrink under it. FUTURE_WRITE needs Linux
        // 5.1.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&arena.fd, seals).map_err(system("fcntl (Linux 5.1)"))?;
        Ok(arena)
    }

    /// Maps a peer's memory for reading.
    ///
    /// # Errors
    ///
    /// [`ArenaError::Peer`] if `fd` is not sealed memory of at least `bytes` bytes.
    pub fn map_peer(fd: OwnedFd, bytes: u64) -> Result<Arena, ArenaError> {
        let peer = |why: String| ArenaError::Peer { why };
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|error| peer(format!("it cannot be sealed ({error})")))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(peer("it is not sealed against shrinking".into()));
        }
        let there = rustix::fs::fstat(&fd).map_err(|error| peer(error.to_string()))?;
        if there.st_size.cast_unsigned() < bytes || bytes == 0 {
            let size = there.st_size;
            return Err(peer(format!("it has {size} bytes instead of {bytes}")));
        }
        let bytes = to_usize(bytes);
        let base = map(&fd, bytes, ProtFlags::READ).map_err(|error| peer(error.to_string()))?;
        Ok(Arena { fd, base, bytes })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The address of the mapping in this process.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The descriptor to pass to another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns `len` bytes of the memory from offset `at`.
    ///
    /// # Safety
    ///
    /// No process writes to these bytes while the slice lives.
    ///
    /// # Panics
    ///
    /// If the range exceeds the memory.
    pub unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes));
        // SAFETY: inside the mapping (asserted), which lives as long as `self`. The kernel zeroed
        // the memory, so it is initialized. The caller ensures that there is no writer.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at), len) }
    }

    /// Copies from the memory while other processes may write to it. Verifies the copy if `sum` is
    /// given, the expected checksum. Returns `false` if the range exceeds the memory or the
    /// checksum differs.
    pub fn copy_out(&self, at: u64, out: &mut [u8], sum: Option<u64>) -> bool {
        let end = at.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.bytes as u64) {
            return false;
        }
        // SAFETY: inside the mapping, which cannot shrink, and `out` is memory of this process that
        // no other thread uses, so the two do not overlap. `copy` reads without a data race: bytes
        // that the peer changes at the same time arrive with their old or their new value.
        unsafe {
            let from = self.base.as_ptr().add(to_usize(at));
            let to = out.as_mut_ptr();
            if let Some(sum) = sum {
                return copy_hashed(from, to, out.len()) == sum;
            }
            copy(from, to, out.len());
        }
        true
    }

    /// Returns `len` bytes of the memory from offset `at`, for writing.
    ///
    /// # Safety
    ///
    /// Nothing else in this process reads or writes these bytes while the slice lives. The arena
    /// was created here; it is not a peer's.
    ///
    /// # Panics
    ///
    /// If the range exceeds the memory.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, at: usize, len: usize) -> &mut [u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes));
        // SAFETY: as above; the caller ensures that the slice is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(at), len) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, once; no slice outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

fn map(fd: &OwnedFd, bytes: usize, prot: ProtFlags) -> Result<NonNull<u8>, Errno> {
    // SAFETY: a new mapping at an address of the kernel's choice overlaps none of ours.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            bytes,
            prot,
            MapFlags::SHARED | MapFlags::POPULATE,
            fd,
            0,
        )
    }?;
    Ok(NonNull::new(base.cast()).expect("a mapping has an address other than 0"))
}

fn refusal(bytes: u64, call: &'static str, source: Errno) -> ArenaError {
    match source {
        Errno::FBIG => ArenaError::Limit {
            bytes,
            limit: rustix::process::getrlimit(rustix::process::Resource::Fsize)
                .current
                .unwrap_or(u64::MAX),
            what: "file size limit, ulimit -f",
        },
        source => ArenaError::System {
            bytes,
            call,
            source,
        },
    }
}

fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_reads_written_bytes_and_refuses_memory_that_could_shrink() {
        let arena = Arena::create(8192).unwrap();
        let peer = Arena::map_peer(arena.fd().try_clone_to_owned().unwrap(), 8192).unwrap();
        // SAFETY: one thread, and the slices do not live at the same time.
        unsafe {
            arena.bytes_mut(4096, 3).copy_from_slice(b"abc");
            assert_eq!(peer.bytes(4096, 3), b"abc");
        }
        let fd = arena.fd().try_clone_to_owned().unwrap();
        let error = Arena::map_peer(fd, 8193).err().unwrap();
        assert!(error.to_string().contains("8192"), "{error}");
        let open = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 8192).unwrap();
        let error = Arena::map_peer(open, 8192).err().unwrap();
        assert!(error.to_string().contains("shrinking"), "{error}");
    }

    #[test]
    fn the_descriptor_grants_reads_only() {
        let arena = Arena::create(8192).unwrap();
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let fd = arena.fd().try_clone_to_owned().unwrap();
        assert_eq!(map(&fd, 8192, both).err(), Some(Errno::PERM));
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let again = std::fs::File::options().read(true).write(true).open(again);
        if let Ok(again) = again {
            assert_eq!(map(&again.into(), 8192, both).err(), Some(Errno::PERM));
        }
        // SAFETY: one thread.
        unsafe { arena.bytes_mut(0, 1)[0] = 7 };
        let peer = Arena::map_peer(fd, 8192).unwrap();
        // SAFETY: one thread.
        assert_eq!(unsafe { peer.bytes(0, 1) }, [7]);
    }

    #[test]
    fn more_memory_than_available_is_refused_before_allocation() {
        let error = Arena::create(1 << 50).err().unwrap();
        let text = error.to_string();
        assert!(matches!(error, ArenaError::Limit { .. }), "{text}");
        assert!(text.contains("fewer bytes"), "{text}");
    }
}
