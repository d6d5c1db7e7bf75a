//! Members of gzip data.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

use flate2::bufread::GzDecoder;

use super::error::Damage;

/// What damage is told of.
const WHAT: &str = "gzip";

/// Counts what is used of the bytes.
#[derive(Debug)]
struct Used<R> {
    inner: R,
    bytes: Rc<Cell<u64>>,
}

impl<R: BufRead> Read for Used<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        self.bytes.set(self.bytes.get() + count as u64);
        Ok(count)
    }
}

impl<R: BufRead> BufRead for Used<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.inner.consume(count);
        self.bytes.set(self.bytes.get() + count as u64);
    }
}

/// Decompresses what one or several programs wrote one after the other. The library's reader of
/// several does not tell where one that is cut off ends, nor it from other bytes that follow.
pub(super) struct Members<R: BufRead> {
    /// `None` after the last.
    member: Option<GzDecoder<Used<R>>>,
    used: Rc<Cell<u64>>,
}

impl<R: Read> Members<BufReader<R>> {
    pub(super) fn new(bytes: R) -> Self {
        let used = Rc::<Cell<u64>>::default();
        let bytes = Used { inner: BufReader::new(bytes), bytes: used.clone() };
        Self { member: Some(GzDecoder::new(bytes)), used }
    }
}

/// The first byte of compressed data.
const MAGIC: u8 = 0x1f;

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        while let Some(member) = &mut self.member {
            match member.read(into) {
                Ok(0) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(Damage::Truncated { what: WHAT, at: self.used.get() }.into());
                }
                Err(error) => return Err(Damage::broken(WHAT, error)),
                Ok(count) => return Ok(count),
            }
            let Some(mut rest) = self.member.take().map(GzDecoder::into_inner) else { break };
            let next = loop {
                match rest.fill_buf() {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    buffer => break buffer?.first().copied(),
                }
            };
            match next {
                None => {}
                Some(MAGIC) => self.member = Some(GzDecoder::new(rest)),
                Some(_) => return Err(Damage::Trailing { what: WHAT, at: self.used.get() }.into()),
            }
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn compressed(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn decompressed(bytes: &[u8]) -> Result<Vec<u8>, String> {
        let mut text = Vec::new();
        let read = Members::new(bytes).read_to_end(&mut text);
        read.map(|_| text).map_err(|error| super::super::Reason::from_read(error).to_string())
    }

    #[test]
    fn members_follow_one_another() {
        let (one, two) = (compressed(b"one "), compressed(b"two"));
        assert_eq!(decompressed(&[one, two].concat()).unwrap(), b"one two");
    }

    #[test]
    fn what_is_cut_off_is_told_from_what_follows() {
        let whole = compressed(&[7; 1000]);
        let length = whole.len();
        for cut in 2..length {
            let expected = format!("the gzip data is truncated: the file ends at byte {cut}, before the data does");
            assert_eq!(decompressed(&whole[..cut]).unwrap_err(), expected);
        }
        for follows in [&b"x"[..], &[0; 100], b"a 0 1 0\n"] {
            let expected = format!("other bytes follow the gzip data, from byte {length} of the file on");
            assert_eq!(decompressed(&[&whole[..], follows].concat()).unwrap_err(), expected);
        }
        let damaged = decompressed(&[&whole[..], b"\x1f\x8b12345678901"].concat()).unwrap_err();
        assert!(damaged.starts_with("the gzip data is "), "{damaged}");
    }
}
