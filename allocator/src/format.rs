//! Sizes as text.

use std::fmt;

/// A number of bytes as PyTorch's messages write it: `512 bytes`, `1.50 KiB`, `20.00 MiB`, `3.25
/// GiB`.
///
/// ```
/// use aquifer_allocator::Bytes;
/// assert_eq!(Bytes(20 << 20).to_string(), "20.00 MiB");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// As [`Bytes`], followed by the exact number where two decimals hide a difference: `1.00 GiB
/// (1075838976 bytes)`. For bounds, which a reader compares with other sizes.
pub(crate) struct Exactly(pub(crate) u64);

impl fmt::Display for Exactly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit: u64 = match self.0 {
            0..0x400 => 1,
            0x400..0x10_0000 => 1 << 10,
            0x10_0000..0x4000_0000 => 1 << 20,
            _ => 1 << 30,
        };
        let is_exact = (u128::from(self.0) * 100).is_multiple_of(unit.into());
        write!(f, "{}", Bytes(self.0))?;
        if is_exact { Ok(()) } else { write!(f, " ({} bytes)", self.0) }
    }
}

impl fmt::Display for Bytes {
    #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        let text = match self.0 {
            1 => "1 byte".to_owned(),
            0..0x400 => format!("{} bytes", self.0),
            0x400..0x10_0000 => format!("{:.2} KiB", bytes / 1024.0),
            0x10_0000..0x4000_0000 => format!("{:.2} MiB", bytes / f64::from(1 << 20)),
            _ => format!("{:.2} GiB", bytes / f64::from(1 << 30)),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::Exactly;

    #[test]
    fn bounds_say_what_two_decimals_hide() {
        let texts = [0, 1023, 1536, 1537, 20 << 20, (20 << 20) + 512, 1 << 30, (1 << 30) + 1, 1_075_838_976, u64::MAX];
        let texts = texts.map(|bytes| Exactly(bytes).to_string());
        let expected = [
            "0 bytes",
            "1023 bytes",
            "1.50 KiB",
            "1.50 KiB (1537 bytes)",
            "20.00 MiB",
            "20.00 MiB (20972032 bytes)",
            "1.00 GiB",
            "1.00 GiB (1073741825 bytes)",
            "1.00 GiB (1075838976 bytes)",
            "17179869184.00 GiB (18446744073709551615 bytes)",
        ];
        assert_eq!(texts, expected);
    }
}
