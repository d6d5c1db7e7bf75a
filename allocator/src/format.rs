//! How sizes are written for people.

use std::fmt;

/// A number of bytes as PyTorch's messages write it: `512 bytes`, `1.50 KiB`, `20.00 MiB`, `3.25 GiB`.
///
/// ```
/// use aquifer_allocator::Bytes;
/// assert_eq!(Bytes(20 << 20).to_string(), "20.00 MiB");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        let text = match self.0 {
            0..0x400 => format!("{} bytes", self.0),
            0x400..0x10_0000 => format!("{:.2} KiB", bytes / 1024.0),
            0x10_0000..0x4000_0000 => format!("{:.2} MiB", bytes / f64::from(1 << 20)),
            _ => format!("{:.2} GiB", bytes / f64::from(1 << 30)),
        };
        f.pad(&text)
    }
}
