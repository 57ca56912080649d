//! Memory that other processes of the host can map and read.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use crate::copy::{copy, copy_hashed};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The host has less than was asked for. Nothing was taken.
    #[error(
        "{bytes} bytes of shared memory were asked for, and {limit} may be had ({what}); give the \
         host tier fewer bytes or raise the limit"
    )]
    Limit {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes there are.
        limit: u64,
        /// Which limit.
        what: &'static str,
    },
    /// The system refused.
    #[error("{bytes} bytes of shared memory cannot be had: {call} failed")]
    System {
        /// Bytes asked for.
        bytes: u64,
        /// What was tried.
        call: &'static str,
        /// Why it failed.
        source: Errno,
    },
    /// A peer offers memory that could shrink under the reader, or is smaller than it says.
    #[error(
        "a peer's shared memory is refused: {why}; run one release of slipstream on both sides"
    )]
    Peer {
        /// What is wrong with it.
        why: String,
    },
}

/// Shared memory of a fixed size, all of it there from the start: a page that is touched first in
/// the middle of a transfer cannot fail.
///
/// It has no name in any file system, and is gone with the last process that has it open.
pub struct Arena {
    fd: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread; who may read or write which part of it is the callers'
// contract with `bytes` and `bytes_mut`.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Takes `bytes` of memory, which are zero.
    ///
    /// # Errors
    ///
    /// [`ArenaError::Limit`] and [`ArenaError::System`].
    pub fn create(bytes: usize) -> Result<Arena, ArenaError> {
        let asked = bytes as u64;
        let system = |call| move |source| refusal(asked, call, source);
        // Without this check the kernel would kill a process to make room.
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
        // After our own mapping, which stays writable: a process that gets the descriptor can only read,
        // and need not fear that the memory shrinks. FUTURE_WRITE takes Linux 5.1.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&arena.fd, seals).map_err(system("fcntl (Linux 5.1)"))?;
        Ok(arena)
    }

    /// Maps a peer's memory, to read from.
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
        if (there.st_size as u64) < bytes || bytes == 0 {
            let size = there.st_size;
            return Err(peer(format!("it has {size} bytes, and {bytes} were said")));
        }
        let bytes = bytes as usize;
        let base = map(&fd, bytes, ProtFlags::READ).map_err(|error| peer(error.to_string()))?;
        Ok(Arena { fd, base, bytes })
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

    /// What to give to another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Some of the memory.
    ///
    /// # Safety
    ///
    /// No one writes to these bytes while the slice lives, in this process or another.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes));
        // SAFETY: inside the mapping (asserted), which lives as long as `self`, and memory that
        // was zeroed by the kernel is initialized. The caller ensures that there is no writer.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at), len) }
    }

    /// Copies from the memory, whatever others do to it at the same time: the copy has to be
    /// verified if it is a peer's. With `sum`, which is the checksum of the right bytes, it is.
    /// `false` if there are not so many bytes, or others.
    pub fn copy_out(&self, at: u64, out: &mut [u8], sum: Option<u64>) -> bool {
        let end = at.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.bytes as u64) {
            return false;
        }
        // SAFETY: inside the mapping, which cannot shrink, and `out` is memory of this process that
        // nobody else has, so the two do not overlap. `copy` reads it without a data race: bytes that the
        // peer changes at the same time come out as one value or another.
        unsafe {
            let from = self.base.as_ptr().add(at as usize);
            let to = out.as_mut_ptr();
            if let Some(sum) = sum {
                return copy_hashed(from, to, out.len()) == sum;
            }
            copy(from, to, out.len());
        }
        true
    }

    /// Some of the memory, to write to.
    ///
    /// # Safety
    ///
    /// Nothing else in this process reads or writes these bytes while the slice lives, and the
    /// arena is one that was created here, not a peer's.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, at: usize, len: usize) -> &mut [u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes));
        // SAFETY: as above; the caller sees to it that the slice is the only one.
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
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing of ours.
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
    Ok(NonNull::new(base.cast()).expect("a mapping is not at address 0"))
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
    fn a_peer_sees_what_is_written_and_refuses_what_could_shrink() {
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
    fn whoever_gets_the_descriptor_can_read_and_not_write() {
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
    fn more_memory_than_there_is_is_refused_before_it_is_taken() {
        let error = Arena::create(1 << 50).err().unwrap();
        let text = error.to_string();
        assert!(matches!(error, ArenaError::Limit { .. }), "{text}");
        assert!(text.contains("fewer bytes"), "{text}");
    }
}
