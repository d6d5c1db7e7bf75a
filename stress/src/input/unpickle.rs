//! A pickle machine for plain data, protocols 2 to 5.
//!
//! Snapshots are mostly call stacks, which nobody needs here: see [`Arena`] for what is kept. Everything else is
//! read past. The machine never recurses.

use std::collections::HashMap;
use std::io::BufRead;

use super::allowance;
use super::arena::{Arena, LONGEST, MALFORMED, Value, Word};
use super::error::{Fault, Location, Reason};
use super::gzip::Stored;

/// Runs a pickle up to its end; gives what it leaves, and where. `stored` tells how much was read of the file.
pub(super) fn run(content: impl BufRead, stored: &Stored) -> Result<(Value, Arena), Fault> {
    let mut machine = Machine {
        bytes: Bytes { content, offset: 0 },
        arena: Arena::default(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        sparse_memo: HashMap::new(),
    };
    loop {
        let at = machine.bytes.offset;
        match machine.step() {
            Ok(None) => machine.check(stored).map_err(|reason| Fault::new(Location::Byte(at), reason))?,
            Ok(Some(value)) => return Ok((value, machine.arena)),
            Err(reason) => return Err(Fault::new(Location::Byte(at), reason)),
        }
    }
}

struct Machine<R> {
    bytes: Bytes<R>,
    arena: Arena,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Value>,
    /// What is memoised under other numbers than the next one.
    sparse_memo: HashMap<u32, Value>,
}

impl<R: BufRead> Machine<R> {
    /// Runs one opcode; gives the pickle's value at its end.
    fn step(&mut self) -> Result<Option<Value>, Reason> {
        const FOLLOWED: Reason = Reason::Pickle("something follows its end");
        let code = self.bytes.byte()?;
        let value = match code {
            0x80 => {
                return match self.bytes.byte()? {
                    2..=5 => Ok(None),
                    _ => Err(Reason::Pickle("only the protocols 2 to 5 are supported")),
                };
            }
            0x95 => return self.bytes.skip(8).map(|()| None),
            b'.' => {
                // Reading up to the end also has the decompressor check its sums.
                return if self.bytes.at_end()? { self.pop().map(Some) } else { Err(FOLLOWED) };
            }
            b'(' => {
                self.marks.try_reserve(1)?;
                self.marks.push(self.stack.len());
                return Ok(None);
            }
            b'N' | 0x88 | 0x89 => Value::Other,
            b'J' => Value::Int(i64::from(i32::from_le_bytes(self.bytes.array()?)).cast_unsigned()),
            b'K' => Value::Int(self.bytes.byte()?.into()),
            b'M' => Value::Int(u16::from_le_bytes(self.bytes.array()?).into()),
            0x8a => self.bytes.long()?,
            b'G' => self.bytes.skip(8).map(|()| Value::Other)?,
            0x8c => {
                let length = self.bytes.byte()?;
                self.bytes.string(length.into())?
            }
            b'X' => {
                let length = u32::from_le_bytes(self.bytes.array()?);
                self.bytes.string(length.into())?
            }
            0x8d => {
                let length = u64::from_le_bytes(self.bytes.array()?);
                self.bytes.string(length)?
            }
            b']' | b')' => self.arena.list(&[])?,
            b'}' => self.arena.dict(&[])?,
            0x85..=0x87 => {
                let from = self.floor(usize::from(code - 0x84))?;
                let tuple = self.arena.list(&self.stack[from..])?;
                self.stack.truncate(from);
                tuple
            }
            b'l' | b't' | b'd' => {
                let from = self.marks.pop().ok_or(Reason::Pickle("a mark is missing"))?;
                let items = &self.stack[from..];
                let made = if code == b'd' { self.arena.dict(items) } else { self.arena.list(items) };
                self.stack.truncate(from);
                made?
            }
            b'a' | b'e' | b's' | b'u' => {
                let from = match code {
                    b'a' => self.floor(1)?,
                    b's' => self.floor(2)?,
                    _ => self.marks.pop().ok_or(Reason::Pickle("a mark is missing"))?,
                };
                let onto = from.checked_sub(1).filter(|&onto| self.marks.last().is_none_or(|&mark| onto >= mark));
                let onto = self.stack[onto.ok_or(MALFORMED)?];
                let items = &self.stack[from..];
                let list = matches!(code, b'a' | b'e');
                let done = if list { self.arena.append(onto, items) } else { self.arena.set(onto, items) };
                done?;
                self.stack.truncate(from);
                return Ok(None);
            }
            b'q' | b'r' | 0x94 => {
                let top = self.stack[self.floor(1)?];
                let number = match code {
                    b'q' => self.bytes.byte()?.into(),
                    b'r' => u32::from_le_bytes(self.bytes.array()?),
                    _ => u32::try_from(self.memo.len()).map_err(|_| Reason::TooMany("memos"))?,
                };
                if number as usize == self.memo.len() {
                    self.memo.try_reserve(1)?;
                    self.memo.push(top);
                } else if let Some(memo) = self.memo.get_mut(number as usize) {
                    *memo = top;
                } else {
                    self.sparse_memo.try_reserve(1)?;
                    self.sparse_memo.insert(number, top);
                }
                return Ok(None);
            }
            b'h' | b'j' => {
                let number =
                    if code == b'h' { self.bytes.byte()?.into() } else { u32::from_le_bytes(self.bytes.array()?) };
                let memo = self.memo.get(number as usize).or_else(|| self.sparse_memo.get(&number));
                *memo.ok_or(Reason::Pickle("an object is used before it is memoised"))?
            }
            _ => return Err(Reason::Opcode { code }),
        };
        self.stack.try_reserve(1)?;
        self.stack.push(value);
        Ok(None)
    }

    /// Refuses to take more memory than a snapshot would.
    fn check(&self, stored: &Stored) -> Result<(), Reason> {
        // What is not in order of its number is memoised with it, in a table that is partly empty.
        let values = self.stack.len() + self.memo.len() + 3 * self.sparse_memo.len();
        let taken = self.arena.bytes() + values * size_of::<Value>() + self.marks.len() * size_of::<usize>();
        allowance::check(taken, self.bytes.offset, stored)
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
}

struct Bytes<R> {
    content: R,
    offset: u64,
}

impl<R: BufRead> Bytes<R> {
    /// What is buffered, at least one byte.
    fn buffer(&mut self) -> Result<&[u8], Reason> {
        match self.content.fill_buf().map_err(Reason::from_read)? {
            [] => Err(Reason::Pickle("it ends early")),
            buffer => Ok(buffer),
        }
    }

    fn at_end(&mut self) -> Result<bool, Reason> {
        self.content.fill_buf().map(<[u8]>::is_empty).map_err(Reason::from_read)
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

    fn skip(&mut self, mut count: u64) -> Result<(), Reason> {
        while count > 0 {
            let buffered = self.buffer()?.len();
            let part = usize::try_from(count).unwrap_or(usize::MAX).min(buffered);
            self.consume(part);
            count -= part as u64;
        }
        Ok(())
    }

    /// A string: a word, or of no use.
    fn string(&mut self, length: u64) -> Result<Value, Reason> {
        let mut word = [0; LONGEST];
        match usize::try_from(length).ok().and_then(|length| word.get_mut(..length)) {
            Some(word) => {
                self.fill(word)?;
                Ok(Word::from_bytes(word).map_or(Value::Other, Value::Word))
            }
            None => self.skip(length).map(|()| Value::Other),
        }
    }

    /// An integer in two's complement; of no use beyond 64 bits.
    fn long(&mut self) -> Result<Value, Reason> {
        let length = usize::from(self.byte()?);
        let mut bytes = [0; 255];
        self.fill(&mut bytes[..length])?;
        let fill = if length > 0 && bytes[length - 1] >= 0x80 { 0xff } else { 0 };
        let mut low = [fill; 8];
        let count = length.min(8);
        low[..count].copy_from_slice(&bytes[..count]);
        let fits = bytes[count..length].iter().all(|&byte| byte == fill);
        Ok(if fits { Value::Int(u64::from_le_bytes(low)) } else { Value::Other })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a pickle that is not compressed.
    fn run(pickle: &[u8]) -> Result<(Value, Arena), Fault> {
        let stored = Stored::default();
        stored.add(pickle.len());
        super::run(pickle, &stored)
    }

    fn error(pickle: &[u8]) -> String {
        run(pickle).map(|_| ()).unwrap_err().at("p".as_ref()).to_string()
    }

    #[test]
    fn integers() {
        for (pickle, expected) in [
            (&b"\x80\x02K\xff."[..], 255),
            (b"M\x01\x02.", 513),
            (b"J\xff\xff\xff\xff.", u64::MAX),
            (b"\x8a\x00.", 0),
            (b"\x8a\x01\x80.", (-128i64).cast_unsigned()),
            (b"\x8a\x06\x00\x00\x00\x00\x00\x7f.", 0x7f00_0000_0000),
            (b"\x8a\x09\x01\x00\x00\x00\x00\x00\x00\x80\x00.", (1 << 63) + 1),
        ] {
            assert_eq!(run(pickle).unwrap().0, Value::Int(expected));
        }
        assert_eq!(run(&b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01."[..]).unwrap().0, Value::Other);
    }

    #[test]
    fn containers() {
        let (value, mut arena) = run(&b"}(X\x04\0\0\0size\x94K\x07\x8c\x05other](K\x01Neh\0K\x08u."[..]).unwrap();
        let Value::Dict(dict) = value else { panic!("{value:?}") };
        assert_eq!(arena.get(dict, Word::Size), Some(Value::Int(8)));
        assert_eq!(arena.get(dict, Word::Addr), None);
        assert_eq!(arena.take(0), [Value::Int(1), Value::Other]);
        assert_eq!(arena.take(0), []);
        assert_ne!(arena.digest(0), 0);
        let (value, arena) = run(&b"K\0K\0\x86."[..]).unwrap();
        assert!(matches!(value, Value::List(pair) if arena.is_zeros(pair)));
    }

    /// `count` times `item`, in a list.
    fn list_of(item: &[u8], count: usize) -> Vec<u8> {
        [&b"]("[..], &item.repeat(count)[..], b"e."].concat()
    }

    #[test]
    fn of_long_lists_of_numbers_only_the_first_are_kept() {
        let batches = b"(K\x01K\x02K\x03K\x04e".repeat(1 << 20);
        let (value, mut arena) = super::run(&[&b"]"[..], &batches, b"."].concat()[..], &Stored::default()).unwrap();
        assert_eq!(value, Value::List(0));
        assert_eq!(arena.take(0), [Value::Int(1), Value::Int(2), Value::Int(3), Value::Other]);
        assert!(arena.bytes() < 1000);
    }

    #[test]
    fn what_few_stored_bytes_hold_takes_little_memory() {
        for item in [&b"K\x01"[..], b"N", b"]", b"}", b"N\x94"] {
            // With a text, as it takes more than its bytes allow without any.
            let pickle = list_of(&[item, b"\x8c\x0cnot so dense"].concat(), 3 << 20);
            assert!(run(&pickle).is_ok());
            let stored = Stored::default();
            stored.add(pickle.len() / 1000);
            let fault = super::run(&pickle[..], &stored).map(|_| ()).unwrap_err().at("p".as_ref()).to_string();
            assert!(fault.contains(" bytes of the file hold more values"), "{fault}");
        }
    }

    #[test]
    fn what_is_not_compressed_takes_little_memory_too() {
        for dense in [&b"\x85"[..], b"]", b")"] {
            let pickle = [b"]", &dense.repeat(3 << 20)[..], b"."].concat();
            assert!(error(&pickle).contains(" bytes of the file hold more values"), "{dense:?}");
        }
    }

    #[test]
    fn a_list_within_itself_is_harmless() {
        let (value, mut arena) = run(&b"]\x94h\0a."[..]).unwrap();
        assert_eq!((value, arena.take(0)), (Value::List(0), vec![Value::List(0)]));
        assert!(run(&[&[b']'; 1 << 18][..], b"."].concat()[..]).is_ok());
    }

    #[test]
    fn errors_name_opcode_and_byte() {
        for (pickle, expected) in [
            (
                &b"\x80\x04cos\nsystem\n"[..],
                "p:byte 2: unsupported pickle opcode 0x63 (GLOBAL); memory snapshots hold plain data only",
            ),
            (b"NNR.", "p:byte 2: unsupported pickle opcode 0x52 (REDUCE); memory snapshots hold plain data only"),
            (b"\x80\x00", "p:byte 0: damaged pickle: only the protocols 2 to 5 are supported"),
            (b"]X\xff\xff\xff\xffab", "p:byte 1: damaged pickle: it ends early"),
            (b".", "p:byte 0: damaged pickle: a value is missing"),
            (b"](Na.", "p:byte 3: damaged pickle: an opcode does not fit what it is applied to"),
            (b"N.N", "p:byte 1: damaged pickle: something follows its end"),
            (b"Na", "p:byte 1: damaged pickle: an opcode does not fit what it is applied to"),
            (b"}(Nu.", "p:byte 3: damaged pickle: an opcode does not fit what it is applied to"),
            (b"e", "p:byte 0: damaged pickle: a mark is missing"),
            (b"(h\x00", "p:byte 1: damaged pickle: an object is used before it is memoised"),
        ] {
            assert_eq!(error(pickle), expected);
        }
    }

    #[test]
    fn sparse_memos_cost_no_room() {
        assert_eq!(run(&b"K\x05r\xff\xff\xff\xffj\xff\xff\xff\xff."[..]).unwrap().0, Value::Int(5));
    }
}
