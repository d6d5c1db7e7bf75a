//! A pickle machine for data, protocols 2 to 5.
//!
//! Snapshots are mostly call stacks, which repeat: [`Arena`] lists the values that are kept.
//! Everything else is skipped, including objects of classes: no class is looked up and no code
//! runs. The machine never recurses.

use std::io::BufRead;

use super::allowance::{Allowance, VALUES};
use super::arena::{Arena, MALFORMED, START, TEXT, Value, digest, mix};
use super::error::{Fault, Location, Reason};

/// Runs a pickle up to its end; returns its value.
pub(super) fn run(content: impl BufRead, allowance: &Allowance) -> Result<(Value, Arena), Fault> {
    let mut machine = Machine {
        bytes: Bytes { content, offset: 0 },
        arena: Arena::default(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
    };
    loop {
        let at = machine.bytes.offset;
        match machine.step() {
            Ok(None) => machine.check(allowance).map_err(|reason| Fault::new(Location::Byte(at), reason))?,
            Ok(Some(value)) => return Ok((value, machine.arena)),
            Err(reason) => return Err(Fault::new(Location::Byte(at), reason)),
        }
    }
}

/// A class or function of Python, by its name. A dictionary with a default or an order is a
/// dictionary; no other object matters.
const OBJECT: Value = Value::Other(3);
const DICT_CLASS: Value = Value::Other(4);
const MARK_MISSING: Reason = Reason::Pickle("a mark is missing");
/// The most zeros with which PyTorch pads a pickle before it writes it in base64.
const MOST_FILL: u64 = 3;

struct Machine<R> {
    bytes: Bytes<R>,
    arena: Arena,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Value>,
}

impl<R: BufRead> Machine<R> {
    /// Runs one opcode; returns the pickle's value at its end.
    fn step(&mut self) -> Result<Option<Value>, Reason> {
        let code = self.bytes.byte()?;
        let value = match code {
            0x80 => {
                return match self.bytes.byte()? {
                    2..=5 => Ok(None),
                    _ => Err(Reason::Pickle("only the protocols 2 to 5 are supported")),
                };
            }
            0x95 => return self.bytes.digest(START, 8).map(|_| None),
            b'.' => {
                // Reading up to the end also lets the decompressor check its checksums.
                self.bytes.end()?;
                return self.pop().map(Some);
            }
            b'(' => {
                self.marks.try_reserve(1)?;
                self.marks.push(self.stack.len());
                return Ok(None);
            }
            b'N' => Value::Other(5),
            0x88 => Value::Other(6),
            0x89 => Value::Other(7),
            b'J' => Value::Int(i64::from(i32::from_le_bytes(self.bytes.array()?)).cast_unsigned()),
            b'K' => Value::Int(self.bytes.byte()?.into()),
            b'M' => Value::Int(u16::from_le_bytes(self.bytes.array()?).into()),
            0x8a => self.bytes.long()?,
            0x8b => self.opaque(4)?,
            b'G' => Value::float(f64::from_be_bytes(self.bytes.array()?)),
            0x8c => self.string(1)?,
            b'X' => self.string(4)?,
            0x8d => self.string(8)?,
            b'U' | b'C' => self.opaque(1)?,
            b'T' | b'B' => self.opaque(4)?,
            0x8e | 0x96 => self.opaque(8)?,
            b']' | b')' => self.arena.list(&[])?,
            b'}' => self.arena.dict(&[])?,
            0x85..=0x87 => {
                let from = self.floor(usize::from(code - 0x84))?;
                let tuple = self.arena.list(&self.stack[from..])?;
                self.stack.truncate(from);
                tuple
            }
            b'l' | b't' | b'd' => {
                let from = self.marks.pop().ok_or(MARK_MISSING)?;
                let items = &self.stack[from..];
                let made = if code == b'd' { self.arena.dict(items) } else { self.arena.list(items) };
                self.stack.truncate(from);
                made?
            }
            b'a' | b'e' | b's' | b'u' | 0x90 => return self.add(code).map(|()| None),
            b'q' | b'r' | 0x94 => return self.memoise(code).map(|()| None),
            b'h' | b'j' => {
                let number =
                    if code == b'h' { self.bytes.byte()?.into() } else { u32::from_le_bytes(self.bytes.array()?) };
                *self.memo.get(number as usize).ok_or(Reason::Pickle("an object is used before it is memoised"))?
            }
            b'0' => return self.pop().map(|_| None),
            b'1' => {
                self.stack.truncate(self.marks.pop().ok_or(MARK_MISSING)?);
                return Ok(None);
            }
            b'2' => self.stack[self.floor(1)?],
            // From here on, objects of classes.
            b'c' => {
                let (module, name) = (self.bytes.line()?, self.bytes.line()?);
                class(module, name)
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                class(self.arena.digest(module), self.arena.digest(name))
            }
            b'R' | 0x81 => {
                let (_arguments, class) = (self.pop()?, self.pop()?);
                if class == DICT_CLASS { self.arena.dict(&[])? } else { OBJECT }
            }
            0x92 => {
                let (_keywords, _arguments, _class) = (self.pop()?, self.pop()?, self.pop()?);
                OBJECT
            }
            b'o' | 0x91 => {
                self.stack.truncate(self.marks.pop().ok_or(MARK_MISSING)?);
                OBJECT
            }
            // Attributes of objects are not kept.
            b'b' => return self.pop().map(|_| None),
            0x8f | 0x97 => OBJECT,
            0x98 => return Ok(None),
            b'Q' => self.pop().map(|_| OBJECT)?,
            b'P' => self.bytes.line().map(|_| OBJECT)?,
            0x82..=0x84 => self.bytes.digest(START, 1 << (code - 0x82)).map(|_| OBJECT)?,
            _ => return Err(Reason::Opcode { code }),
        };
        self.stack.try_reserve(1)?;
        self.stack.push(value);
        Ok(None)
    }

    /// Adds the topmost values to the list, dictionary or set below them.
    fn add(&mut self, code: u8) -> Result<(), Reason> {
        let from = match code {
            b'a' => self.floor(1)?,
            b's' => self.floor(2)?,
            _ => self.marks.pop().ok_or(MARK_MISSING)?,
        };
        let onto = from.checked_sub(1).filter(|&onto| self.marks.last().is_none_or(|&mark| onto >= mark));
        let onto = self.stack[onto.ok_or(MALFORMED)?];
        let items = &self.stack[from..];
        match (code, onto) {
            (_, Value::Other(_)) => {}
            (b'a' | b'e', _) => self.arena.append(onto, items)?,
            (b's' | b'u', _) => {
                if onto == Value::Dict(0) {
                    items.iter().step_by(2).for_each(|&key| self.arena.outermost_key(key));
                }
                self.arena.set(onto, items)?;
            }
            _ => return Err(MALFORMED),
        }
        self.stack.truncate(from);
        Ok(())
    }

    fn memoise(&mut self, code: u8) -> Result<(), Reason> {
        let top = self.stack[self.floor(1)?];
        let number = match code {
            b'q' => self.bytes.byte()?.into(),
            b'r' => u32::from_le_bytes(self.bytes.array()?),
            _ => u32::try_from(self.memo.len()).map_err(|_| Reason::TooMany("2^32 memos"))?,
        };
        if number as usize == self.memo.len() {
            self.memo.try_reserve(1)?;
            self.memo.push(top);
            return Ok(());
        }
        // Pickles are written with the next number, or with one that is used again.
        *self.memo.get_mut(number as usize).ok_or(Reason::Pickle("an object is memoised out of order"))? = top;
        Ok(())
    }

    /// Refuses to use more memory than a snapshot would.
    fn check(&self, allowance: &Allowance) -> Result<(), Reason> {
        let values = self.stack.len() + self.memo.len();
        let used = self.arena.bytes() + values * size_of::<Value>() + self.marks.len() * size_of::<usize>();
        allowance.check(used, VALUES)
    }

    /// Where the topmost `count` values start; none may lie below a mark.
    fn floor(&self, count: usize) -> Result<usize, Reason> {
        let mark = self.marks.last().copied().unwrap_or(0);
        let floor = self.stack.len().checked_sub(count).filter(|&floor| floor >= mark);
        floor.ok_or(Reason::Pickle("a value is missing"))
    }

    fn pop(&mut self) -> Result<Value, Reason> {
        self.floor(1)?;
        self.stack.pop().ok_or(Reason::Pickle("a value is missing"))
    }

    /// A text, after its length of `width` bytes.
    fn string(&mut self, width: usize) -> Result<Value, Reason> {
        let length = self.bytes.length(width)?;
        let mut start = [0; TEXT];
        match usize::try_from(length).ok().and_then(|length| start.get_mut(..length)) {
            Some(text) => {
                self.bytes.fill(text)?;
                Ok(self.arena.text(text))
            }
            None => {
                self.bytes.fill(&mut start)?;
                let digest = self.bytes.digest(digest(START, &start), length - TEXT as u64)?;
                Ok(self.arena.long_text(&start, digest))
            }
        }
    }

    /// Bytes that are not text, after their length of `width` bytes.
    fn opaque(&mut self, width: usize) -> Result<Value, Reason> {
        let length = self.bytes.length(width)?;
        self.bytes.digest(START, length).map(Value::Other)
    }
}

/// A class, by the digests of its module's name and its own.
fn class(module: u64, name: u64) -> Value {
    let is = |text: &str, digested: u64| digest(START, text.as_bytes()) == digested;
    let dict = is("defaultdict", name) || is("OrderedDict", name);
    if dict && is("collections", module) { DICT_CLASS } else { OBJECT }
}

struct Bytes<R> {
    content: R,
    offset: u64,
}

impl<R: BufRead> Bytes<R> {
    /// The buffered bytes; at least one.
    fn buffer(&mut self) -> Result<&[u8], Reason> {
        match self.content.fill_buf().map_err(Reason::from_read)? {
            [] => Err(Reason::Pickle("it ends early")),
            buffer => Ok(buffer),
        }
    }

    /// Reads up to the end. Only a few zeros may precede it.
    fn end(&mut self) -> Result<(), Reason> {
        let mut zeros = 0;
        loop {
            let buffer = self.content.fill_buf().map_err(Reason::from_read)?;
            let count = buffer.len();
            zeros += count as u64;
            if count == 0 {
                return Ok(());
            }
            if zeros > MOST_FILL || buffer.iter().any(|&byte| byte != 0) {
                return Err(Reason::Pickle("something follows its end"));
            }
            self.consume(count);
        }
    }

    fn consume(&mut self, count: usize) {
        self.content.consume(count);
        self.offset += count as u64;
    }

    fn byte(&mut self) -> Result<u8, Reason> {
        let byte = self.buffer()?[0];
        self.consume(1);
        Ok(byte)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Reason> {
        let mut array = [0; N];
        self.fill(&mut array)?;
        Ok(array)
    }

    fn fill(&mut self, mut into: &mut [u8]) -> Result<(), Reason> {
        while !into.is_empty() {
            let buffer = self.buffer()?;
            let count = buffer.len().min(into.len());
            let (part, rest) = into.split_at_mut(count);
            part.copy_from_slice(&buffer[..count]);
            self.consume(count);
            into = rest;
        }
        Ok(())
    }

    /// A length, in `width` bytes.
    fn length(&mut self, width: usize) -> Result<u64, Reason> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes[..width])?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads bytes and returns the digest of those before and of them.
    fn digest(&mut self, before: u64, mut count: u64) -> Result<u64, Reason> {
        let mut so_far = before;
        while count > 0 {
            let buffer = self.buffer()?;
            let part = usize::try_from(count).unwrap_or(usize::MAX).min(buffer.len());
            so_far = digest(so_far, &buffer[..part]);
            self.consume(part);
            count -= part as u64;
        }
        Ok(so_far)
    }

    /// Reads a line and returns its digest.
    fn line(&mut self) -> Result<u64, Reason> {
        let mut so_far = START;
        loop {
            match self.byte()? {
                b'\n' => return Ok(so_far),
                byte => so_far = digest(so_far, &[byte]),
            }
        }
    }

    /// An integer in two's complement; only a digest if it has more than 64 bits.
    fn long(&mut self) -> Result<Value, Reason> {
        let length = usize::from(self.byte()?);
        let mut bytes = [0; 255];
        self.fill(&mut bytes[..length])?;
        let fill = if length > 0 && bytes[length - 1] >= 0x80 { 0xff } else { 0 };
        let mut low = [fill; 8];
        let count = length.min(8);
        low[..count].copy_from_slice(&bytes[..count]);
        let fits = bytes[count..length].iter().all(|&byte| byte == fill);
        Ok(if fits { Value::Int(u64::from_le_bytes(low)) } else { Value::Other(mix(8, u64::from_le_bytes(low))) })
    }
}

#[cfg(test)]
mod tests;
