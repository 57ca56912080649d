//! Whether the blocks of two engines are compatible: compared once, when they connect.

use slipstream_base::width::to_u16;

use crate::wire::{FrameKind, Reader, WireError, frame, put_text};

/// The properties that a block's bytes depend on, in addition to its key. Two stores whose profiles
/// differ in any field refuse each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// Model name.
    pub model: String,
    /// Digest of the weights ([`crate::content::digest`]).
    pub weights: String,
    /// Digest of the configuration, tokenizer and adapters, which also decide the bytes of blocks.
    pub config: String,
    /// vLLM's `prefix_caching_hash_algo`.
    pub hash_algo: String,
    /// Seed of hash chains: vLLM's `get_none_hash_seed`, or `PYTHONHASHSEED`.
    pub hash_seed: String,
    /// Tokens per block.
    pub block_size: u32,
    /// Groups of layers whose blocks have separate keys, in the order of their ids; empty if the
    /// caller has only one kind of block.
    pub groups: String,
    /// Bytes of the largest block.
    pub block_bytes: u64,
    /// Order of dimensions, such as `NHD`.
    pub layout: String,
    /// Type of the cache's elements, such as `bfloat16`.
    pub dtype: String,
    /// Number of tensor-parallel ranks, and the index of this one.
    pub tp: (u32, u32),
    /// Number of pipeline-parallel ranks, and the index of this one.
    pub pp: (u32, u32),
}

impl Profile {
    fn fields(&self) -> [(&'static str, String); 12] {
        let ranks = |(size, rank): (u32, u32)| format!("rank {rank} of {size}");
        [
            ("model", self.model.clone()),
            ("weights", self.weights.clone()),
            ("config", self.config.clone()),
            ("hash_algo", self.hash_algo.clone()),
            ("hash_seed", self.hash_seed.clone()),
            ("block_size", self.block_size.to_string()),
            ("groups", self.groups.clone()),
            ("block_bytes", self.block_bytes.to_string()),
            ("layout", self.layout.clone()),
            ("dtype", self.dtype.clone()),
            ("tp", ranks(self.tp)),
            ("pp", ranks(self.pp)),
        ]
    }
}

/// The peer's blocks are not compatible with ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{field}` is `{ours}` on {our_name} and `{theirs}` on {their_name}; engines that share blocks \
     need one value"
)]
pub struct Mismatch {
    /// Field of [`Profile`].
    pub field: String,
    /// This side's value.
    pub ours: String,
    /// The peer's value; `none` if the peer does not send the field.
    pub theirs: String,
    /// This side.
    pub our_name: String,
    /// The peer.
    pub their_name: String,
}

/// The first frame of each side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) name: String,
    /// Random per process.
    pub(crate) instance: u64,
    /// Bytes of shared memory, whose descriptor is sent after both sides accept; 0: none.
    pub(crate) arena_bytes: u64,
    fields: Vec<(String, String)>,
}

impl Hello {
    /// `transport` is how this connection moves blocks.
    pub(crate) fn new(
        name: &str,
        instance: u64,
        arena_bytes: u64,
        profile: &Profile,
        transport: &str,
    ) -> Hello {
        let transport = ("transport", transport.to_owned());
        let fields = profile.fields().into_iter().chain([transport]);
        Hello {
            name: name.to_owned(),
            instance,
            arena_bytes,
            fields: fields
                .map(|(field, value)| (field.to_owned(), value))
                .collect(),
        }
    }

    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut body = Vec::new();
        body.extend(self.instance.to_le_bytes());
        body.extend(self.arena_bytes.to_le_bytes());
        put_text(&mut body, &self.name);
        body.extend(to_u16(self.fields.len()).to_le_bytes());
        for (field, value) in &self.fields {
            put_text(&mut body, field);
            put_text(&mut body, value);
        }
        frame(FrameKind::Hello, &body)
    }

    pub(crate) fn read(body: &[u8]) -> Result<Hello, WireError> {
        let mut body = Reader(body);
        let (instance, arena_bytes, name) = (body.u64()?, body.u64()?, body.text()?);
        let count = body.u16()?;
        let mut fields = Vec::new();
        for _ in 0..count {
            fields.push((body.text()?, body.text()?));
        }
        body.end()?;
        Ok(Hello {
            name,
            instance,
            arena_bytes,
            fields,
        })
    }

    /// Compares this side's greeting with the peer's.
    pub(crate) fn check(&self, peer: &Hello) -> Result<(), Mismatch> {
        let value = |hello: &Hello, field: &str| {
            let found = hello.fields.iter().find(|(name, _)| name == field);
            found.map_or_else(|| "none".to_owned(), |(_, value)| value.clone())
        };
        let all = self.fields.iter().chain(&peer.fields);
        for (field, _) in all {
            let (ours, theirs) = (value(self, field), value(peer, field));
            if ours != theirs {
                return Err(Mismatch {
                    field: field.clone(),
                    ours,
                    theirs,
                    our_name: self.name.clone(),
                    their_name: peer.name.clone(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        Profile {
            model: "m".into(),
            weights: "w".into(),
            config: "c".into(),
            hash_algo: "sha256_cbor".into(),
            hash_seed: "0".into(),
            block_size: 16,
            groups: "full 16".into(),
            block_bytes: 1 << 20,
            layout: "NHD".into(),
            dtype: "bfloat16".into(),
            tp: (2, 1),
            pp: (1, 0),
        }
    }

    #[test]
    fn every_field_counts_and_both_values_are_named() {
        let ours = Hello::new("a", 1, 0, &profile(), "tcp");
        let check = |change: &dyn Fn(&mut Profile), field: &str, values: [&str; 2]| {
            let mut theirs = profile();
            change(&mut theirs);
            let theirs = Hello::new("b", 2, 0, &theirs, "tcp");
            let (_, body, _) = crate::wire::read_frame(&theirs.frame())
                .unwrap()
                .map(|(k, b, l)| (k, b.to_vec(), l))
                .unwrap();
            let read = Hello::read(&body).unwrap();
            assert_eq!(read, theirs);
            let error = ours.check(&read).unwrap_err();
            assert_eq!(error.field, field);
            let text = error.to_string();
            for value in values {
                assert!(text.contains(&format!("`{value}`")), "{text}");
            }
        };
        check(&|p| p.model = "n".into(), "model", ["m", "n"]);
        check(&|p| p.weights = "v".into(), "weights", ["w", "v"]);
        check(&|p| p.config = "d".into(), "config", ["c", "d"]);
        check(
            &|p| p.hash_algo = "xxhash".into(),
            "hash_algo",
            ["sha256_cbor", "xxhash"],
        );
        check(&|p| p.hash_seed = "7".into(), "hash_seed", ["0", "7"]);
        check(&|p| p.block_size = 32, "block_size", ["16", "32"]);
        check(
            &|p| p.groups = "full 16, window 1024 of 16".into(),
            "groups",
            ["full 16", "full 16, window 1024 of 16"],
        );
        check(&|p| p.block_bytes = 1, "block_bytes", ["1048576", "1"]);
        check(&|p| p.layout = "HND".into(), "layout", ["NHD", "HND"]);
        check(&|p| p.dtype = "fp8".into(), "dtype", ["bfloat16", "fp8"]);
        check(&|p| p.tp = (2, 0), "tp", ["rank 1 of 2", "rank 0 of 2"]);
        check(&|p| p.pp = (2, 0), "pp", ["rank 0 of 1", "rank 0 of 2"]);
        assert_eq!(
            ours.check(&Hello::new("b", 2, 9, &profile(), "tcp")),
            Ok(())
        );
        let error = ours.check(&Hello::new("b", 2, 0, &profile(), "nixl"));
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("`transport` is `tcp` on a and `nixl` on b"),
            "{text}"
        );
        // A later release may send more fields.
        let mut more = Hello::new("b", 2, 0, &profile(), "tcp");
        more.fields.push(("quantization".into(), "x".into()));
        assert_eq!(ours.check(&more).unwrap_err().ours, "none");
    }
}
