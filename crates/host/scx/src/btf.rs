//! The part of the kernel's type information (BTF) that decides whether a `sched_ext`
//! program can load: its structs, and the parameters of its functions.
//!
//! Source: Linux `Documentation/bpf/btf.rst`.

use std::collections::BTreeMap;

const MAGIC: u16 = 0xeb9f;
const KIND_PTR: u32 = 2;
const KIND_STRUCT: u32 = 4;
const KIND_FUNC: u32 = 12;
const KIND_FUNC_PROTO: u32 = 13;

/// Why the bytes are not BTF.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BtfError {
    /// The magic number differs.
    #[error("not BTF of this machine's byte order")]
    Magic,
    /// The data ends too early, or an offset points outside of it.
    #[error("the type information is cut off or damaged at byte {0}")]
    Short(usize),
    /// A type of an unknown kind, whose length is therefore unknown.
    #[error("type {id} is of unknown kind {kind}")]
    Kind {
        /// The type.
        id: u32,
        /// Its kind.
        kind: u32,
    },
}

/// A function: its parameters' names and, for pointers to structs, the struct's name.
pub type Params = Vec<(String, Option<String>)>;

/// Structs by name with their members, and functions with their parameters.
#[derive(Clone, Debug, Default)]
pub struct Btf {
    structs: BTreeMap<String, Vec<String>>,
    functions: BTreeMap<String, Params>,
}

struct Raw<'a> {
    types: &'a [u8],
    strings: &'a [u8],
}

#[derive(Clone, Copy)]
struct Type {
    name: u32,
    kind: u32,
    vlen: usize,
    /// Size or type, by kind.
    word: u32,
    /// Offset of the data after the common part.
    body: usize,
}

impl Raw<'_> {
    fn u32_at(&self, at: usize) -> Result<u32, BtfError> {
        let bytes = self.types.get(at..at + 4).ok_or(BtfError::Short(at))?;
        Ok(u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
    }

    fn string(&self, at: u32) -> Result<String, BtfError> {
        let rest = self
            .strings
            .get(at as usize..)
            .ok_or(BtfError::Short(at as usize))?;
        let end = rest
            .iter()
            .position(|&b| b == 0)
            .ok_or(BtfError::Short(at as usize))?;
        Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
    }
}

impl Btf {
    /// Parses the contents of `/sys/kernel/btf/vmlinux`, and keeps only the structs and functions
    /// named in `wanted`: a kernel has 100,000 others.
    ///
    /// # Errors
    /// If the bytes are not BTF, or use a later format.
    pub fn parse(bytes: &[u8], wanted: &[&str]) -> Result<Btf, BtfError> {
        let raw = sections(bytes)?;
        let types = index(&raw)?;
        let is_wanted = |name: u32| {
            let at = raw.strings.get(name as usize..).unwrap_or_default();
            let is = |w: &&str| at.get(w.len()) == Some(&0) && at.starts_with(w.as_bytes());
            wanted.iter().any(is)
        };
        let mut btf = Btf::default();
        for t in &types {
            match t.kind {
                KIND_STRUCT if is_wanted(t.name) => {
                    let members: Result<Vec<String>, BtfError> = (0..t.vlen)
                        .map(|i| raw.string(raw.u32_at(t.body + 12 * i)?))
                        .collect();
                    btf.structs.insert(raw.string(t.name)?, members?);
                }
                KIND_FUNC if is_wanted(t.name) => {
                    let name = raw.string(t.name)?;
                    let Some(proto) = resolve(&types, t.word) else {
                        continue;
                    };
                    if proto.kind == KIND_FUNC_PROTO {
                        btf.functions.insert(name, params(&raw, &types, proto)?);
                    }
                }
                _ => {}
            }
        }
        Ok(btf)
    }

    /// A struct's members, by name.
    pub fn members(&self, name: &str) -> Option<&[String]> {
        self.structs.get(name).map(Vec::as_slice)
    }

    /// A function's parameters.
    pub fn params(&self, name: &str) -> Option<&Params> {
        self.functions.get(name)
    }
}

/// The functions that a BPF object imports, with the number of parameters of each. The object's type
/// information marks them as external.
///
/// # Errors
/// As [`Btf::parse`].
pub fn externs(bytes: &[u8]) -> Result<Vec<(String, usize)>, BtfError> {
    /// `BTF_FUNC_EXTERN`, stored in the field that holds the number of members for other kinds.
    const EXTERN: usize = 2;
    let raw = sections(bytes)?;
    let types = index(&raw)?;
    let mut found = Vec::new();
    for t in types
        .iter()
        .filter(|t| t.kind == KIND_FUNC && t.vlen == EXTERN)
    {
        if let Some(proto) = resolve(&types, t.word) {
            found.push((raw.string(t.name)?, proto.vlen));
        }
    }
    Ok(found)
}

/// Checks the header and finds the two sections.
fn sections(bytes: &[u8]) -> Result<Raw<'_>, BtfError> {
    let word = |at: usize| {
        let b = bytes.get(at..at + 4).ok_or(BtfError::Short(at))?;
        Ok(u32::from_ne_bytes(b.try_into().expect("four bytes")) as usize)
    };
    let magic = bytes.get(..2).ok_or(BtfError::Short(0))?;
    if magic != MAGIC.to_ne_bytes() {
        return Err(BtfError::Magic);
    }
    let header = word(4)?;
    let section = |offset: usize, length: usize| {
        let start = header.saturating_add(offset);
        let end = start.saturating_add(length);
        bytes.get(start..end).ok_or(BtfError::Short(start))
    };
    Ok(Raw {
        types: section(word(8)?, word(12)?)?,
        strings: section(word(16)?, word(20)?)?,
    })
}

fn resolve(types: &[Type], id: u32) -> Option<Type> {
    types.get((id as usize).checked_sub(1)?).copied()
}

fn params(raw: &Raw, types: &[Type], proto: Type) -> Result<Params, BtfError> {
    (0..proto.vlen)
        .map(|i| {
            let name = raw.string(raw.u32_at(proto.body + 8 * i)?)?;
            let mut at = resolve(types, raw.u32_at(proto.body + 8 * i + 4)?);
            let mut pointer = false;
            // Follow the pointer and its qualifiers (const, volatile, restrict, type tags); the
            // bound guards against a cycle in damaged data.
            for _ in 0..8 {
                match at {
                    Some(t) if t.kind == KIND_PTR => {
                        pointer = true;
                        at = resolve(types, t.word);
                    }
                    Some(t) if matches!(t.kind, 9..=11 | 18) => at = resolve(types, t.word),
                    _ => break,
                }
            }
            let target = match at {
                // 7 is a forward declaration.
                Some(t) if pointer && matches!(t.kind, KIND_STRUCT | 7) => {
                    Some(raw.string(t.name)?)
                }
                _ => None,
            };
            Ok((name, target))
        })
        .collect()
}

/// Finds the offset of each type.
fn index(raw: &Raw) -> Result<Vec<Type>, BtfError> {
    let mut types = Vec::new();
    let mut at = 0;
    while at < raw.types.len() {
        let (name, info, word) = (raw.u32_at(at)?, raw.u32_at(at + 4)?, raw.u32_at(at + 8)?);
        let (kind, vlen) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
        let body = at + 12;
        let extra = match kind {
            1 | 14 | 17 => 4,                       // int, var, declaration tag
            KIND_PTR | 7..=12 | 16 | 18 => 0,       // one-word kinds
            3 => 12,                                // array
            KIND_STRUCT | 5 | 15 | 19 => 12 * vlen, // struct, union, data section, enum64
            6 | KIND_FUNC_PROTO => 8 * vlen,        // enum, prototype
            _ => {
                return Err(BtfError::Kind {
                    id: u32::try_from(types.len() + 1).unwrap_or(u32::MAX),
                    kind,
                });
            }
        };
        types.push(Type {
            name,
            kind,
            vlen,
            word,
            body,
        });
        at = body + extra;
    }
    Ok(types)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Writes BTF for tests.
    pub(crate) struct Writer {
        types: Vec<u8>,
        strings: Vec<u8>,
        count: u32,
    }

    impl Writer {
        pub(crate) fn new() -> Writer {
            Writer {
                types: Vec::new(),
                strings: vec![0],
                count: 0,
            }
        }

        fn name(&mut self, name: &str) -> u32 {
            let at = self.strings.len() as u32;
            self.strings.extend(name.bytes());
            self.strings.push(0);
            at
        }

        fn common(&mut self, name: u32, kind: u32, vlen: usize, word: u32) -> u32 {
            for w in [name, kind << 24 | vlen as u32, word] {
                self.types.extend(w.to_ne_bytes());
            }
            self.count += 1;
            self.count
        }

        pub(crate) fn strukt(&mut self, name: &str, members: &[&str]) -> u32 {
            let names: Vec<u32> = members.iter().map(|m| self.name(m)).collect();
            let name = self.name(name);
            let id = self.common(name, KIND_STRUCT, members.len(), 8);
            for n in names {
                for w in [n, 0, 0] {
                    self.types.extend(w.to_ne_bytes());
                }
            }
            id
        }

        pub(crate) fn pointer(&mut self, to: u32) -> u32 {
            self.common(0, KIND_PTR, 0, to)
        }

        pub(crate) fn function(&mut self, name: &str, params: &[(&str, u32)]) {
            let names: Vec<u32> = params.iter().map(|p| self.name(p.0)).collect();
            let proto = self.common(0, KIND_FUNC_PROTO, params.len(), 0);
            for (n, (_, t)) in names.into_iter().zip(params) {
                for w in [n, *t] {
                    self.types.extend(w.to_ne_bytes());
                }
            }
            let name = self.name(name);
            self.common(name, KIND_FUNC, 0, proto);
        }

        pub(crate) fn finish(self) -> Vec<u8> {
            let mut out = Vec::new();
            out.extend(MAGIC.to_ne_bytes());
            out.extend([1, 0]);
            let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
            for w in [24, 0, types, types, strings] {
                out.extend(w.to_ne_bytes());
            }
            out.extend(self.types);
            out.extend(self.strings);
            out
        }
    }

    #[test]
    fn structs_and_prototypes_are_read() {
        let mut w = Writer::new();
        let task = w.strukt("task_struct", &["pid", "comm"]);
        let pointer = w.pointer(task);
        w.function("kick", &[("p", pointer), ("cpu", 0)]);
        let btf = Btf::parse(&w.finish(), &["task_struct", "kick", "other"]).unwrap();
        assert_eq!(btf.members("task_struct").unwrap(), ["pid", "comm"]);
        assert_eq!(
            btf.params("kick").unwrap(),
            &[
                ("p".to_owned(), Some("task_struct".to_owned())),
                ("cpu".to_owned(), None)
            ]
        );
        assert!(btf.params("other").is_none());
    }

    #[test]
    fn damaged_bytes_are_refused_wherever_they_end() {
        let mut w = Writer::new();
        let task = w.strukt("task_struct", &["pid"]);
        let pointer = w.pointer(task);
        w.function("kick", &[("p", pointer)]);
        let bytes = w.finish();
        for end in 0..bytes.len() {
            assert!(
                Btf::parse(&bytes[..end], &["kick"]).is_err(),
                "cut at {end}"
            );
        }
        assert_eq!(Btf::parse(&[0; 64], &[]).unwrap_err(), BtfError::Magic);
    }

    #[test]
    fn this_kernels_own_is_read_if_it_has_one() {
        let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            eprintln!("SKIPPED: no /sys/kernel/btf/vmlinux");
            return;
        };
        let btf = Btf::parse(&bytes, &["task_struct", "wake_up_process"]).unwrap();
        assert!(
            btf.members("task_struct")
                .unwrap()
                .iter()
                .any(|m| m == "comm")
        );
        assert!(btf.params("wake_up_process").is_some_and(|p| p.len() == 1));
    }
}
