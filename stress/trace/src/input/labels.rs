//! The call stacks and tags of a recorded program.

use std::fmt;

use super::error::Reason;
use crate::text::one_line;

/// The call stacks and tags of a file, each once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Labels {
    /// Names of functions and files, and tags.
    texts: Vec<Box<str>>,
    frames: Vec<Frame>,
    /// Numbers of frames, the innermost first.
    stacks: Vec<Box<[u32]>>,
    /// Memory of the texts and the lists of frames.
    content_bytes: usize,
    has_tags: bool,
}

/// A frame of a call stack: numbers of texts, and a line, 0 if none is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) name: u32,
    pub(super) file: u32,
    pub(super) line: u32,
}

/// A frame of a call stack in words: its function, its file, and a line, 0 if none is known. `?`
/// and `??` stand for unknown names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Call<'a> {
    pub name: &'a str,
    pub file: &'a str,
    pub line: u32,
}

impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = if self.line > 0 { format!(":{}", self.line) } else { String::new() };
        f.write_str(&one_line(&format!("{} ({}{line})", self.name, self.file), LONGEST_FRAME))
    }
}

impl Labels {
    /// The calls of a call stack, the innermost first.
    pub fn calls(&self, stack: u32) -> impl Iterator<Item = Call<'_>> {
        let frames = (stack as usize).checked_sub(1).and_then(|stack| self.stacks.get(stack));
        frames.into_iter().flatten().filter_map(|&frame| self.frames.get(frame as usize)).map(|frame| {
            let text = |number| self.text(number).unwrap_or("?");
            Call { name: text(frame.name), file: text(frame.file), line: frame.line }
        })
    }

    /// A text; `None` for 0. Tags are texts.
    pub fn text(&self, text: u32) -> Option<&str> {
        (text as usize).checked_sub(1).and_then(|text| self.texts.get(text)).map(|text| &**text)
    }

    /// Whether there are neither call stacks nor tags.
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty() && !self.has_tags
    }

    /// Adds a text and returns its number; 0 if it is empty.
    pub(super) fn add_text(&mut self, text: &str) -> Result<u32, Reason> {
        if text.is_empty() {
            return Ok(0);
        }
        self.texts.try_reserve(1)?;
        self.content_bytes += text.len();
        self.texts.push(text.into());
        number(self.texts.len())
    }

    /// Adds a tag and returns its number; 0 if it is empty.
    pub(super) fn add_tag(&mut self, text: &str) -> Result<u32, Reason> {
        let tag = self.add_text(&one_line(text, LONGEST_TAG))?;
        self.has_tags |= tag > 0;
        Ok(tag)
    }

    /// Adds a frame and returns its number.
    pub(super) fn add_frame(&mut self, frame: Frame) -> Result<u32, Reason> {
        self.frames.try_reserve(1)?;
        self.frames.push(frame);
        number(self.frames.len() - 1)
    }

    /// Adds a call stack and returns its number; 0 if it is empty.
    pub(super) fn add_stack(&mut self, frames: &[u32]) -> Result<u32, Reason> {
        if frames.is_empty() {
            return Ok(0);
        }
        self.stacks.try_reserve(1)?;
        self.content_bytes += size_of_val(frames);
        self.stacks.push(frames.into());
        number(self.stacks.len())
    }

    /// Memory in use.
    pub(super) fn bytes(&self) -> usize {
        let lists = self.texts.capacity() + self.stacks.capacity();
        lists * size_of::<Box<str>>() + self.frames.capacity() * size_of::<Frame>() + self.content_bytes
    }
}

fn number(index: usize) -> Result<u32, Reason> {
    u32::try_from(index).map_err(|_| Reason::TooMany("2^32 call stacks, frames or tags"))
}

/// The longest frame of a call stack in characters.
const LONGEST_FRAME: usize = 300;

/// The longest tag in characters.
const LONGEST_TAG: usize = 100;
