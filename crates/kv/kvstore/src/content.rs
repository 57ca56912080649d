//! A digest of file contents that two hosts can compare, such as the weights of a model.
//!
//! [`Depth::Full`] reads every byte, on several threads. Its result can be cached in a folder, so
//! that unchanged files are not read again. [`Depth::Sampled`] reads the header of a safetensors
//! file, and of each tensor the first 4 KiB of each MiB and the end. It detects other weights
//! (another training step, another seed), but not an edit of a few rows.
//!
//! The digest is XXH3 with 128 bits. It distinguishes versions; it is no defense against forgery.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::FlockOperation;
use slipstream_base::sync::lock;
use slipstream_base::width::{high_u64, low_u64, to_usize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Bytes that a thread hashes at a time.
const CHUNK_BYTES: u64 = 16 << 20;
/// Length of a sample, and the distance between samples.
const SAMPLE_BYTES: u64 = 4 << 10;
const SAMPLE_STRIDE: u64 = 1 << 20;
/// Sampling reads tensors up to this size whole.
const WHOLE_BYTES: u64 = 16 << 10;
/// Reader threads. Samples wait for the disk, so this may exceed the number of CPUs.
const THREADS: usize = 8;
/// Maximum length of a safetensors header. Source: safetensors' format, 100 MB.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Timestamps of a file system may be this coarse: a file changed within this time could change
/// again with the same timestamp.
const RACY: Duration = Duration::from_secs(2);

/// How much of the files is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Every byte.
    Full,
    /// Samples of every tensor.
    Sampled,
}

/// Why files have no digest.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// No file to read.
    #[error("no files to digest")]
    Empty,
    /// A file cannot be read.
    #[error("{path} cannot be read")]
    Io {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// A file was written to during the digest. A retry may succeed.
    #[error("{path} changed while it was read; wait until it is complete")]
    Changed {
        /// The file.
        path: PathBuf,
    },
}

/// Returns the digest of the contents of `paths`, as 32 hexadecimal digits. Names and order of the
/// files do not matter.
///
/// `cache`: a folder for full digests of files by device, inode, size, modification and change time
/// and samples. Processes that share it read a file once; without write access nothing is kept.
///
/// # Errors
///
/// [`ContentError`].
pub fn digest(
    paths: &[PathBuf],
    depth: Depth,
    cache: Option<&Path>,
) -> Result<String, ContentError> {
    if paths.is_empty() {
        return Err(ContentError::Empty);
    }
    let mut digests = Vec::with_capacity(paths.len());
    for path in paths {
        let file = Opened::open(path)?;
        let digest = match (depth, cache) {
            (Depth::Sampled, _) => file.sampled()?,
            (Depth::Full, None) => file.full()?,
            (Depth::Full, Some(cache)) => file.full_cached(cache)?,
        };
        digests.push((file.before.len(), digest));
    }
    digests.sort_unstable();
    let mut all = Xxh3::new();
    all.update(match depth {
        Depth::Full => b"full",
        Depth::Sampled => b"some",
    });
    for (len, digest) in digests {
        all.update(&len.to_le_bytes());
        all.update(&digest.to_le_bytes());
    }
    Ok(format!("{:032x}", all.digest128()))
}

/// Pairs of offset and length, or of offset and end.
type Ranges = Vec<(u64, u64)>;

/// A file, with its metadata when it was opened.
struct Opened<'a> {
    path: &'a Path,
    file: File,
    before: Metadata,
}

impl Opened<'_> {
    fn open(path: &Path) -> Result<Opened<'_>, ContentError> {
        let error = |source| ContentError::Io {
            path: path.to_path_buf(),
            source,
        };
        let file = File::open(path).map_err(error)?;
        let before = file.metadata().map_err(error)?;
        Ok(Opened { path, file, before })
    }

    fn error(&self, source: io::Error) -> ContentError {
        // The file became shorter.
        if source.kind() == io::ErrorKind::UnexpectedEof {
            return self.changed();
        }
        ContentError::Io {
            path: self.path.to_path_buf(),
            source,
        }
    }

    fn changed(&self) -> ContentError {
        ContentError::Changed {
            path: self.path.to_path_buf(),
        }
    }

    fn full(&self) -> Result<u128, ContentError> {
        let ranges: Vec<(u64, u64)> = (0..self.before.len())
            .step_by(to_usize(CHUNK_BYTES))
            .map(|at| (at, CHUNK_BYTES.min(self.before.len() - at)))
            .collect();
        self.hash(&ranges)
    }

    fn sampled(&self) -> Result<u128, ContentError> {
        let len = self.before.len();
        let tensors = self.tensors().map_err(|source| self.error(source))?;
        let mut ranges = Vec::new();
        match tensors {
            Some((header_end, tensors)) => {
                ranges.push((0, header_end));
                for (begin, end) in tensors {
                    sample(begin, end, &mut ranges);
                }
            }
            None => sample(0, len, &mut ranges),
        }
        self.hash(&ranges)
    }

    /// The end of the header of a safetensors file, and its tensors. `None` for other files.
    fn tensors(&self) -> io::Result<Option<(u64, Ranges)>> {
        let len = self.before.len();
        if len < 8 {
            return Ok(None);
        }
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, 0)?;
        let header_len = u64::from_le_bytes(word);
        if header_len > HEADER_BYTES_MAX || 8 + header_len > len {
            return Ok(None);
        }
        let mut header = vec![0; to_usize(header_len)];
        self.file.read_exact_at(&mut header, 8)?;
        let Ok(serde_json::Value::Object(entries)) = serde_json::from_slice(&header) else {
            return Ok(None);
        };
        let mut tensors = Vec::new();
        let header_end = 8 + header_len;
        for (name, entry) in &entries {
            if name == "__metadata__" {
                continue;
            }
            let offset = |at: usize| entry.get("data_offsets")?.get(at)?.as_u64();
            let (Some(begin), Some(end)) = (offset(0), offset(1)) else {
                return Ok(None);
            };
            let (begin, end) = (header_end.checked_add(begin), header_end.checked_add(end));
            match (begin, end) {
                (Some(begin), Some(end)) if begin <= end && end <= len => {
                    tensors.push((begin, end));
                }
                _ => return Ok(None),
            }
        }
        tensors.sort_unstable();
        Ok(Some((header_end, tensors)))
    }

    /// Hashes ranges of the file on several threads.
    fn hash(&self, ranges: &[(u64, u64)]) -> Result<u128, ContentError> {
        let next = AtomicUsize::new(0);
        let parts = Mutex::new(vec![0u128; ranges.len()]);
        let failed: Mutex<Option<io::Error>> = Mutex::new(None);
        let work = || {
            let mut bytes = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(&(begin, len)) = ranges.get(at) else {
                    return;
                };
                bytes.resize(to_usize(len), 0);
                match self.file.read_exact_at(&mut bytes, begin) {
                    Ok(()) => lock(&parts)[at] = xxh3_128(&bytes),
                    Err(error) => {
                        *lock(&failed) = Some(error);
                        next.store(ranges.len(), Ordering::Relaxed);
                        return;
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..THREADS.min(ranges.len()) {
                // If no thread can be started, the others hash all of it.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        if let Some(error) = lock(&failed).take() {
            return Err(self.error(error));
        }
        let after = fs::metadata(self.path).map_err(|source| self.error(source))?;
        if stamp(&after) != stamp(&self.before) {
            return Err(self.changed());
        }
        let mut all = Xxh3::new();
        for part in lock(&parts).iter() {
            all.update(&part.to_le_bytes());
        }
        Ok(all.digest128())
    }

    /// The full digest, from `cache` if the file's stamp is unchanged.
    fn full_cached(&self, cache: &Path) -> Result<u128, ContentError> {
        let mut what = stamp(&self.before).to_vec();
        let sampled = self.sampled()?;
        what.extend([high_u64(sampled), low_u64(sampled)]);
        let what: Vec<u8> = what.iter().flat_map(|word| word.to_le_bytes()).collect();
        let entry = cache.join(format!("{:032x}", xxh3_128(&what)));
        if let Some(found) = read_entry(&entry) {
            return Ok(found);
        }
        // One of several ranks of a host reads the file; the others wait for it.
        let lock =
            fs::create_dir_all(cache).and_then(|()| File::create(entry.with_extension("lock")));
        if let Ok(lock) = &lock {
            let _ = rustix::fs::flock(lock, FlockOperation::LockExclusive);
            if let Some(found) = read_entry(&entry) {
                return Ok(found);
            }
        }
        let digest = self.full()?;
        let changed = self.before.modified().ok().into_iter().chain(
            u64::try_from(self.before.ctime())
                .ok()
                .map(|s| SystemTime::UNIX_EPOCH + Duration::from_secs(s)),
        );
        let is_racy = changed.max().is_none_or(|at| {
            let age = SystemTime::now().duration_since(at);
            age.map_or(true, |age| age < RACY)
        });
        if !is_racy {
            let part = entry.with_extension(format!("{}.part", std::process::id()));
            let text = format!("{digest:032x} {}\n", self.path.display());
            // If the cache cannot be written, the file is read again each time.
            let _ = fs::write(&part, text).and_then(|()| fs::rename(&part, &entry));
        }
        if lock.is_ok() {
            let _ = fs::remove_file(entry.with_extension("lock"));
        }
        Ok(digest)
    }
}

fn sample(begin: u64, end: u64, ranges: &mut Vec<(u64, u64)>) {
    let len = end - begin;
    if len <= WHOLE_BYTES {
        ranges.push((begin, len));
        return;
    }
    let mut at = begin;
    while at + SAMPLE_BYTES < end {
        ranges.push((at, SAMPLE_BYTES));
        at += SAMPLE_STRIDE;
    }
    ranges.push((end - SAMPLE_BYTES, SAMPLE_BYTES));
}

/// Metadata that changes with a file's content.
fn stamp(meta: &Metadata) -> [u64; 7] {
    [
        meta.dev(),
        meta.ino(),
        meta.len(),
        meta.mtime().cast_unsigned(),
        meta.mtime_nsec().cast_unsigned(),
        meta.ctime().cast_unsigned(),
        meta.ctime_nsec().cast_unsigned(),
    ]
}

fn read_entry(path: &Path) -> Option<u128> {
    let text = fs::read_to_string(path).ok()?;
    u128::from_str_radix(text.get(..32)?, 16).ok()
}
