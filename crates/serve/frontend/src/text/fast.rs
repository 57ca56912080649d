//! The fast encoder: the same tokens as the `tokenizers` library, in about a hundredth of the time.
//!
//! It is used only if it reads the file and gives the library's tokens for a set of sample texts.

use serde_json::Value;
use tokenizers::Tokenizer;

/// Bytes of text and tokens that are kept between requests, so that a chat's next turn costs what
/// is new. Segments between special tokens are the unit; the least recently used go first.
const SEGMENT_CACHE_BYTES: usize = 32 << 20;

/// Texts in which encoders have been seen to differ: contractions, runs of spaces and line ends,
/// digits, scripts without spaces, combining marks, characters outside the basic plane, code.
const SAMPLES: [&str; 10] = [
    "It's what they'd've said: we'll, I'M, YOU'RE, d'accord, 'tis, don''t.",
    "  two spaces\n\n\n three line ends \r\n\t\ttabs   \u{a0}\u{3000}wide \u{200b}zero \n ",
    "1 12 123 1234 12345678 3.14159 1,000,000 0x1f ½ ² ٣٤ १२ 1e-9 v1.2.3",
    "für Ärger naïve Ελληνικά русский язык עברית العربية हिन्दी ไทย 日本語の文 한국어 中文。",
    "e\u{301} = é, A\u{30a} = Å, ﬁ, Ⅳ, ㍿, ｆｕｌｌ, \u{1e9b}\u{323}, ǆ, ẞ, İ, ı",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 𝔘𝔫𝔦 𐍈 \u{10ffff} \u{fffd} \u{feff} \u{e000}",
    "fn main() {\n    let x: Vec<u8> = vec![0; 4096]; // why?\n    x.iter().map(|b| b ^ 0xff)\n}\n",
    "{\"a\":[1,2,{\"b\":null}],\"c\":\"\\u00e9\\n\"}\n<|not_a_token|> </s> <s> [INST] <unk>",
    "https://example.org/a/b?c=d&e=%20#f user@example.org C:\\dir\\file.txt --flag=value $HOME",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!!!!!!!! ======== ________",
];

/// Reads `json`, the text of a `tokenizer.json`, and compares with `library` on samples and on
/// `words`, a text of the tokens that answers are made of.
///
/// # Errors
/// Why the fast encoder cannot be used with this file, for a log.
pub(super) fn load(
    json: &[u8],
    library: &Tokenizer,
    words: &str,
) -> Result<fastokens::Tokenizer, String> {
    let mut json: Value = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    // A file may ask for every text to be cut or padded; prompts are neither.
    json["truncation"] = Value::Null;
    json["padding"] = Value::Null;
    // A normalized token that stands alone begins where another token ends in the library, and does not in `fastokens`.
    if let Some(added) = json["added_tokens"].as_array()
        && let Some(alone) = added.iter().find(|token| token["single_word"] == true)
    {
        return Err(format!(
            "the added token {} is `single_word`",
            alone["content"]
        ));
    }
    let mut fast = fastokens::Tokenizer::from_json(json).map_err(|error| error.to_string())?;
    let mut special: Vec<String> = library
        .get_added_tokens_decoder()
        .into_values()
        .map(|token| token.content)
        .collect();
    special.sort_unstable();
    special.truncate(256);
    let marked = special.join(" text\n");
    let joined = special.concat();
    let texts = SAMPLES.into_iter().chain([words, &marked, &joined]);
    for text in texts {
        for add_special_tokens in [false, true] {
            if !agree(&fast, library, text, add_special_tokens) {
                let start: String = text.chars().take(40).collect();
                return Err(format!("it gives other tokens for {start:?}..."));
            }
        }
    }
    fast.enable_segment_cache(SEGMENT_CACHE_BYTES);
    Ok(fast)
}

/// Whether `text` has no `ſ` (U+017F). Regular expressions that ignore case take it for an `s`, as in
/// `'s`; the fast encoder does not. The library encodes such texts.
pub(super) fn takes(text: &str) -> bool {
    memchr::memmem::find(text.as_bytes(), "ſ".as_bytes()).is_none()
}

/// [`takes`] for the text in `json`, which may write the character as an escape.
pub(super) fn takes_json(json: &[u8]) -> bool {
    let has = |needle: &[u8]| memchr::memmem::find(json, needle).is_some();
    // With either case of `f`.
    !has("ſ".as_bytes()) && !has(b"\\u017")
}

fn agree(fast: &fastokens::Tokenizer, library: &Tokenizer, text: &str, special: bool) -> bool {
    match (
        fast.encode_with_special_tokens(text, special),
        library.encode_fast(text, special),
    ) {
        (Ok(fast), Ok(library)) => fast == library.get_ids(),
        // Texts without a token are left to the library.
        (Err(_), _) => true,
        (Ok(_), Err(_)) => false,
    }
}
