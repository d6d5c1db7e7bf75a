//! Compressed content, and how much of the file was read for it.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

use flate2::bufread::GzDecoder;

use super::error::Damage;

/// Bytes of the file that were read so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Stored(Rc<Cell<u64>>);

impl Stored {
    pub(super) fn bytes(&self) -> u64 {
        self.0.get()
    }

    pub(super) fn add(&self, count: usize) {
        self.0.set(self.bytes() + count as u64);
    }
}

/// Counts what is read.
#[derive(Debug)]
pub(super) struct Counted<R> {
    inner: R,
    stored: Stored,
}

impl<R> Counted<R> {
    pub(super) fn new(inner: R, stored: Stored) -> Self {
        Self { inner, stored }
    }
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.inner.read(into).inspect(|&count| self.stored.add(count))
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.inner.consume(count);
        self.stored.add(count);
    }
}

/// Decompresses what one or several programs wrote one after the other. The library's reader of several does not tell where one that is cut
/// off ends, nor it from other bytes that follow.
pub(super) struct Members<R: BufRead> {
    /// `None` after the last.
    member: Option<GzDecoder<Counted<R>>>,
    stored: Stored,
}

impl<R: Read> Members<BufReader<R>> {
    pub(super) fn new(bytes: R, stored: Stored) -> Self {
        let bytes = Counted::new(BufReader::new(bytes), stored.clone());
        Self { member: Some(GzDecoder::new(bytes)), stored }
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
                    return Err(Damage::Truncated(self.stored.bytes()).into());
                }
                answer => return answer,
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
                Some(_) => return Err(Damage::Trailing(self.stored.bytes()).into()),
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
        let stored = Stored::default();
        let read = Members::new(bytes, stored.clone()).read_to_end(&mut text);
        read.map(|_| text).map_err(|error| super::super::Reason::from_read(error).to_string()).inspect(|_| {
            assert_eq!(stored.bytes(), bytes.len() as u64);
        })
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
