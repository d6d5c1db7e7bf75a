//! Recordings in a page that PyTorch's `_memory_viz` wrote: files in base64, in a list of objects.

use std::io::{self, BufRead, BufReader, Read};

use base64::engine::general_purpose::STANDARD;
use base64::read::DecoderReader;

use super::error::{Damage, Fault, Reason};
use super::layers::Content;
use super::program::Program;
use super::{Origin, parse};

/// The key before a file.
const KEY: &[u8] = b"\"base64\"";

/// Reads the recordings.
pub(super) fn programs(content: Content<'_>, origin: &Origin<'_>) -> Result<Vec<Program>, Fault> {
    let mut content = BufReader::with_capacity(64 << 10, content);
    let failed = |error| Fault::file(Reason::from_read(error));
    let mut programs = Vec::new();
    while next(&mut content).map_err(failed)? {
        let mut text = Quoted { content: &mut content, done: false };
        let decoder = DecoderReader::new(&mut text, &STANDARD);
        let layers = origin.layers + 1;
        let inside = Origin { name: origin.name.clone(), path: origin.path, layers, allowance: origin.allowance };
        let more = parse(&inside, Box::new(Decoded(decoder)))?;
        origin.allowance.keep(more.iter().map(Program::bytes).sum());
        programs.extend(more);
    }
    if programs.is_empty() { Err(Fault::file(Reason::NothingInside("the page"))) } else { Ok(programs) }
}

/// Goes to the text behind the next key. `false` at the end.
fn next(content: &mut impl BufRead) -> io::Result<bool> {
    let (mut matched, mut before_text) = (0, false);
    loop {
        let &[byte, ..] = content.fill_buf()? else { return Ok(false) };
        content.consume(1);
        match byte {
            b'"' if before_text => return Ok(true),
            b':' | b' ' | b'\t' | b'\r' | b'\n' if before_text => {}
            _ => {
                before_text = false;
                matched = if byte == KEY[matched] { matched + 1 } else { usize::from(byte == KEY[0]) };
                if matched == KEY.len() {
                    (matched, before_text) = (0, true);
                }
            }
        }
    }
}

/// The text up to a quote.
struct Quoted<'a, R> {
    content: &'a mut R,
    done: bool,
}

impl<R: BufRead> Read for Quoted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.done {
            return Ok(0);
        }
        let buffer = self.content.fill_buf()?;
        let count = buffer.len().min(into.len());
        let end = buffer[..count].iter().position(|&byte| byte == b'"');
        let length = end.unwrap_or(count);
        into[..length].copy_from_slice(&buffer[..length]);
        self.done = end.is_some() || buffer.is_empty();
        self.content.consume(length + usize::from(end.is_some()));
        Ok(length)
    }
}

/// What was decoded, whose errors are those of the page.
struct Decoded<R>(R);

impl<R: Read> Read for Decoded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into).map_err(|error| Damage::broken("base64", error))
    }
}
