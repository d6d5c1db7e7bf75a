//! Recordings in a page that PyTorch's `_memory_viz` wrote: files in base64, in a list of objects.

use base64::engine::general_purpose::STANDARD;
use base64::read::DecoderReader;

use super::error::{Fault, Reason};
use super::layers::{Content, Decoder, whole};
use super::others::TIMELINE;
use super::program::Program;
use super::{Origin, parse_inside};

/// The key of a file.
const KEY: &[u8] = b"base64";

/// How the title of a memory timeline begins.
const TITLE: &[u8] = b"<title>GPU Memory Timeline";

/// Reads the recordings.
pub(super) fn programs(content: Content<'_>, origin: &Origin<'_>) -> Result<Vec<Program>, Fault> {
    let page = whole(content, origin.allowance)?;
    let mut programs = Vec::new();
    let mut parts = page.split(|&byte| byte == b'"');
    while let Some(part) = parts.next() {
        if part != KEY || parts.next().is_none_or(|between| between.trim_ascii() != b":") {
            continue;
        }
        let Some(text) = parts.next() else { break };
        let content = Decoder::in_memory("base64", DecoderReader::new(text, &STANDARD));
        programs.extend(parse_inside(origin, origin.name.clone(), origin.path, content)?);
    }
    if !programs.is_empty() {
        return Ok(programs);
    }
    let is_timeline = page.windows(TITLE.len()).any(|part| part == TITLE);
    let reason = if is_timeline { Reason::NotARecording(TIMELINE) } else { Reason::NothingInside("the page") };
    Err(Fault::file(reason))
}
