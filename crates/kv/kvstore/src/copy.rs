//! Copies blocks from memory that is not in a cache.
//!
//! One stream of reads does not saturate the memory bandwidth of a server CPU. A core has a bounded
//! number of outstanding lines, and its prefetchers follow streams page by page. Four pages read in
//! turn are four streams, which is 1.2 to 1.5 times as fast as `memcpy`. A
//! block that is not verified is written past the caches, so that the lines it overwrites are not
//! read first. A block that is verified is hashed while it is still in the caches.
//!
//! Another process may write to the source. A plain load of it would be a data race, which is
//! undefined behavior. So it is read by inline assembly, which is opaque to the compiler (x86-64),
//! or by atomic words (elsewhere). Each byte arrives with its old or its new value.

use xxhash_rust::xxh3::Xxh3;

const PAGE: usize = 4_096;
/// Bytes per cache line, and of the pages that are copied in turn.
const LINE: usize = 64;
const RUN: usize = 4 * PAGE;
/// Shorter blocks are copied plainly: they fit in caches, where the next reader finds them.
const STREAMED_MIN: usize = 256 << 10;

/// Copies `bytes` bytes.
///
/// # Safety
///
/// `from` may be read and `to` written for `bytes` bytes, and the two do not overlap. Other
/// processes may write to `from` at the same time: then each byte arrives with its old or its new
/// value.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise, and the parts are inside it.
    unsafe {
        let mut at = 0;
        if cfg!(target_arch = "x86_64") && bytes >= STREAMED_MIN {
            at = to.align_offset(LINE).min(bytes);
            copy_bytes(from, to, at);
            while bytes - at >= RUN {
                copy_run::<true>(from.add(at), to.add(at));
                at += RUN;
            }
            end_stream();
        }
        copy_bytes(from.add(at), to.add(at), bytes - at);
    }
}

/// Copies `bytes` bytes, and returns the checksum ([`crate::checksum`]) of the copy.
///
/// # Safety
///
/// As [`copy`], and nothing else reads or writes `to`.
pub(crate) unsafe fn copy_hashed(from: *const u8, to: *mut u8, bytes: usize) -> u64 {
    if bytes < RUN {
        // SAFETY: the caller's promise; the copied bytes are initialized.
        return unsafe {
            copy_bytes(from, to, bytes);
            crate::checksum(std::slice::from_raw_parts(to, bytes))
        };
    }
    let mut hash = Xxh3::new();
    let mut at = 0;
    // SAFETY: the caller's promise, and the parts are inside it; the copied bytes are initialized.
    unsafe {
        while at < bytes {
            let part = (bytes - at).min(RUN);
            if part == RUN {
                copy_run::<false>(from.add(at), to.add(at));
            } else {
                copy_bytes(from.add(at), to.add(at), part);
            }
            hash.update(std::slice::from_raw_parts(to.add(at), part));
            at += part;
        }
    }
    hash.digest()
}

/// Copies four pages, one line of each in turn.
///
/// # Safety
///
/// As [`copy`], for `RUN` bytes; `to` is aligned to a line if `STREAMED`.
unsafe fn copy_run<const STREAMED: bool>(from: *const u8, to: *mut u8) {
    for line in (0..PAGE).step_by(LINE) {
        for page in (0..RUN).step_by(PAGE) {
            // SAFETY: inside the run.
            unsafe { copy_line::<STREAMED>(from.add(page + line), to.add(page + line)) }
        }
    }
}

/// # Safety
///
/// As [`copy`], for one line; `to` is aligned to a line if `STREAMED`.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_line<const STREAMED: bool>(from: *const u8, to: *mut u8) {
    use std::arch::asm;
    // SAFETY: SSE2 is part of x86-64; the caller's promise on bytes and alignment.
    unsafe {
        if STREAMED {
            asm!(
                "movdqu {a}, [{from}]",
                "movdqu {b}, [{from} + 16]",
                "movdqu {c}, [{from} + 32]",
                "movdqu {d}, [{from} + 48]",
                "movntdq [{to}], {a}",
                "movntdq [{to} + 16], {b}",
                "movntdq [{to} + 32], {c}",
                "movntdq [{to} + 48], {d}",
                from = in(reg) from,
                to = in(reg) to,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
        } else {
            asm!(
                "movdqu {a}, [{from}]",
                "movdqu {b}, [{from} + 16]",
                "movdqu {c}, [{from} + 32]",
                "movdqu {d}, [{from} + 48]",
                "movdqu [{to}], {a}",
                "movdqu [{to} + 16], {b}",
                "movdqu [{to} + 32], {c}",
                "movdqu [{to} + 48], {d}",
                from = in(reg) from,
                to = in(reg) to,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// # Safety
///
/// As [`copy`], for one line.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_line<const STREAMED: bool>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { copy_bytes(from, to, LINE) }
}

/// Copies few bytes, or bytes that are in caches.
///
/// # Safety
///
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_bytes(from: *const u8, to: *mut u8, bytes: usize) {
    // `rep movsb` takes some 15 ns to start, as long as 512 bytes take this way.
    let lines = if bytes < 512 { bytes / LINE } else { 0 };
    // SAFETY: the caller's promise. The direction flag is clear, as the ABI has it.
    unsafe {
        for at in (0..lines * LINE).step_by(LINE) {
            copy_line::<false>(from.add(at), to.add(at));
        }
        let (from, to, bytes) = (
            from.add(lines * LINE),
            to.add(lines * LINE),
            bytes - lines * LINE,
        );
        if bytes == 0 {
            return;
        }
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies few bytes, or bytes that are in caches.
///
/// # Safety
///
/// As [`copy`].
#[cfg(not(target_arch = "x86_64"))]
#[allow(clippy::cast_ptr_alignment)] // `at` is aligned from the first word on
unsafe fn copy_bytes(from: *const u8, to: *mut u8, bytes: usize) {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
    const WORD: usize = size_of::<u64>();
    let head = from.align_offset(WORD).min(bytes);
    let words_end = head + (bytes - head) / WORD * WORD;
    let byte = |at: usize| {
        // SAFETY: inside the bytes. This process only loads from them, and atomically.
        unsafe {
            to.add(at)
                .write(AtomicU8::from_ptr(from.add(at).cast_mut()).load(Relaxed))
        }
    };
    (0..head).for_each(byte);
    for at in (head..words_end).step_by(WORD) {
        // SAFETY: as above, and the word is aligned at its source.
        unsafe {
            let word = AtomicU64::from_ptr(from.add(at).cast_mut().cast()).load(Relaxed);
            to.add(at).cast::<u64>().write_unaligned(word);
        }
    }
    (words_end..bytes).for_each(byte);
}

/// Orders streamed stores before later stores, as readers of the block expect.
fn end_stream() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_arrive_at_every_length_and_offset_and_no_others_change() {
        let from: Vec<u8> = (0..STREAMED_MIN + 2 * RUN)
            .map(|at| (at * 7 + at / 251) as u8)
            .collect();
        let lengths = [0, 1, LINE, RUN - 1, RUN, RUN + 1];
        let long = lengths.map(|more| STREAMED_MIN - 1 + more);
        for bytes in lengths.into_iter().chain(long) {
            for place in [0, 1, 15, 63] {
                for hashed in [false, true] {
                    let mut to = vec![0xab; bytes + 128];
                    let source = &from[3..3 + bytes];
                    // SAFETY: two separate buffers, each with at least `bytes` bytes after the
                    // offset.
                    unsafe {
                        let to = to.as_mut_ptr().add(place);
                        if hashed {
                            let sum = copy_hashed(source.as_ptr(), to, bytes);
                            assert_eq!(sum, crate::checksum(source), "{bytes}");
                        } else {
                            copy(source.as_ptr(), to, bytes);
                        }
                    }
                    assert!(&to[place..place + bytes] == source, "{bytes} at {place}");
                    let around = to[..place].iter().chain(&to[place + bytes..]);
                    assert!(around.into_iter().all(|&byte| byte == 0xab), "{bytes}");
                }
            }
        }
    }
}
