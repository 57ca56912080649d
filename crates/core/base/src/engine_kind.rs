//! The servers that engines run.

use std::fmt;

/// The server that an engine runs. It decides how its health is asked, and whether streams can continue
/// on another engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// Found by asking: `owned_by` of its models.
    #[default]
    Auto,
    /// `vllm serve`.
    Vllm,
    /// `sglang.launch_server`.
    Sglang,
    /// `llama-server`, or `llama_cpp.server`.
    LlamaCpp,
    /// Slipstream itself.
    Slipstream,
    /// Any other server with OpenAI's API.
    OpenAi,
}

/// All kinds, by code.
const ALL: [EngineKind; 6] = [
    EngineKind::Auto,
    EngineKind::Vllm,
    EngineKind::Sglang,
    EngineKind::LlamaCpp,
    EngineKind::Slipstream,
    EngineKind::OpenAi,
];

// A kind that is missing in `ALL` does not compile: the last one's code is the number of those before it.
const _: () = {
    let mut at = 0;
    while at < ALL.len() {
        assert!(ALL[at] as usize == at, "kinds are listed in their order");
        at += 1;
    }
    assert!(
        EngineKind::OpenAi as usize + 1 == ALL.len(),
        "each kind is listed"
    );
};

impl EngineKind {
    /// The kinds that a cluster file may state, by their words.
    pub const STATED: &'static [(&'static str, EngineKind)] = &[
        ("auto", EngineKind::Auto),
        ("vllm", EngineKind::Vllm),
        ("sglang", EngineKind::Sglang),
        ("llamacpp", EngineKind::LlamaCpp),
        ("openai", EngineKind::OpenAi),
    ];

    /// Word in files and metrics.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Auto => "auto",
            EngineKind::Vllm => "vllm",
            EngineKind::Sglang => "sglang",
            EngineKind::LlamaCpp => "llamacpp",
            EngineKind::Slipstream => "slipstream",
            EngineKind::OpenAi => "openai",
        }
    }

    /// The kind that a cluster file may state by this word.
    pub fn of_name(word: &str) -> Option<EngineKind> {
        let of = |(known, kind): &(&str, EngineKind)| (*known == word).then_some(*kind);
        EngineKind::STATED.iter().find_map(of)
    }

    /// All words of [`STATED`](Self::STATED), for messages.
    pub fn names() -> String {
        let words = EngineKind::STATED.iter();
        let words: Vec<String> = words.map(|(word, _)| format!("`{word}`")).collect();
        words.join(", ")
    }

    /// The kind whose models have this `owned_by`.
    pub fn of_owner(owner: &str) -> Option<EngineKind> {
        match owner {
            "vllm" => Some(EngineKind::Vllm),
            "sglang" => Some(EngineKind::Sglang),
            "llamacpp" => Some(EngineKind::LlamaCpp),
            "slipstream" => Some(EngineKind::Slipstream),
            _ => None,
        }
    }

    /// Its number, for atomics.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The kind of [`code`](Self::code); `Auto` if it is none.
    pub fn of_code(code: u8) -> EngineKind {
        ALL.get(usize::from(code)).copied().unwrap_or_default()
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_keep_their_codes_and_words() {
        for kind in ALL {
            assert_eq!(EngineKind::of_code(kind.code()), kind);
            let stated = (kind != EngineKind::Slipstream).then_some(kind);
            assert_eq!(EngineKind::of_name(kind.name()), stated);
            let owns = !matches!(kind, EngineKind::Auto | EngineKind::OpenAi);
            assert_eq!(EngineKind::of_owner(kind.name()), owns.then_some(kind));
        }
    }
}
