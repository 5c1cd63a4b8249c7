//! The clock that templates read, and Python's `strftime` for it.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A date and a time of day, without a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Clock {
    year: i64,
    /// 1..=12
    month: u8,
    /// 1..=31
    day: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

impl Clock {
    /// Now, UTC.
    pub(crate) fn system() -> Self {
        let seconds =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        Self::from_unix(seconds)
    }

    fn from_unix(seconds: i64) -> Self {
        let (year, month, day) = civil(seconds.div_euclid(86400));
        let rest = seconds.rem_euclid(86400);
        Self {
            year,
            month,
            day,
            hour: (rest / 3600) as u8,
            minute: (rest / 60 % 60) as u8,
            second: (rest % 60) as u8,
        }
    }

    /// `2026-01-02`, with `T03:04` or ` 03:04:05` after it if wanted; fractions and a zone are passed over.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let number = |range: std::ops::Range<usize>| -> Option<i64> {
            let digits = text.get(range)?;
            digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
        };
        let separator =
            |at: usize, any: &[u8]| text.as_bytes().get(at).is_some_and(|b| any.contains(b));
        if !separator(4, b"-") || !separator(7, b"-") {
            return None;
        }
        let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
        let (mut hour, mut minute, mut second) = (0, 0, 0);
        if text.len() > 10 {
            if !separator(10, b"T t") || !separator(13, b":") {
                return None;
            }
            (hour, minute) = (number(11..13)?, number(14..16)?);
            second = if separator(16, b":") { number(17..19)? } else { 0 };
        }
        let clock = Self {
            year,
            month: month as u8,
            day: day as u8,
            hour: hour as u8,
            minute: minute as u8,
            second: second as u8,
        };
        let real = (1..=12).contains(&month) && hour < 24 && minute < 60 && second < 60;
        let real = real && civil(clock.day_number()) == (clock.year, clock.month, clock.day);
        real.then_some(clock)
    }

    fn day_number(&self) -> i64 {
        days_from_civil(self.year, self.month, self.day)
    }

    /// 0 is Sunday.
    fn weekday(&self) -> usize {
        (self.day_number() + 4).rem_euclid(7) as usize
    }

    /// 1 is the first of January.
    fn year_day(&self) -> i64 {
        self.day_number() - days_from_civil(self.year, 1, 1) + 1
    }

    /// As Python formats it in the C locale. `%-d` and its like drop the padding.
    pub(crate) fn strftime(&self, format: &str) -> Result<String, Error> {
        let mut out = String::with_capacity(format.len() + 16);
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut code = chars.next();
            let bare = code == Some('-');
            if bare {
                code = chars.next();
            }
            let Some(code) = code else {
                out.push('%');
                break;
            };
            self.field(code, bare, &mut out)?;
        }
        Ok(out)
    }

    fn field(&self, code: char, bare: bool, out: &mut String) -> Result<(), Error> {
        let twelve = match self.hour % 12 {
            0 => 12,
            hour => hour,
        };
        let number = |out: &mut String, value: i64, width: usize| {
            let width = if bare { 1 } else { width };
            let _ = write!(out, "{value:0width$}");
        };
        match code {
            'Y' => number(out, self.year, 4),
            'y' => number(out, self.year.rem_euclid(100), 2),
            'm' => number(out, self.month.into(), 2),
            'd' => number(out, self.day.into(), 2),
            'H' => number(out, self.hour.into(), 2),
            'I' => number(out, twelve.into(), 2),
            'M' => number(out, self.minute.into(), 2),
            'S' => number(out, self.second.into(), 2),
            'j' => number(out, self.year_day(), 3),
            'f' => out.push_str("000000"),
            'e' if !bare => {
                let _ = write!(out, "{:2}", self.day);
            }
            'e' => number(out, self.day.into(), 1),
            'B' => out.push_str(MONTHS[self.month as usize - 1]),
            'b' | 'h' => out.push_str(&MONTHS[self.month as usize - 1][..3]),
            'A' => out.push_str(DAYS[self.weekday()]),
            'a' => out.push_str(&DAYS[self.weekday()][..3]),
            'w' => number(out, self.weekday() as i64, 1),
            'u' => number(out, (self.weekday() as i64 + 6) % 7 + 1, 1),
            'p' => out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
            'F' => out.push_str(&self.strftime("%Y-%m-%d")?),
            'T' | 'X' => out.push_str(&self.strftime("%H:%M:%S")?),
            'R' => out.push_str(&self.strftime("%H:%M")?),
            'D' | 'x' => out.push_str(&self.strftime("%m/%d/%y")?),
            'c' => out.push_str(&self.strftime("%a %b %e %H:%M:%S %Y")?),
            'Z' | 'z' => {} // a time without a zone has none to write
            'n' => out.push('\n'),
            't' => out.push('\t'),
            '%' => out.push('%'),
            other => {
                let detail = format!("strftime_now does not know `%{other}`");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        }
        Ok(())
    }
}

/// Days since 1970-01-01 of a date of the Gregorian calendar.
fn days_from_civil(year: i64, month: u8, day: u8) -> i64 {
    let shifted = if month <= 2 { year - 1 } else { year }; // years that begin in March
    let era = shifted.div_euclid(400);
    let of_era = shifted.rem_euclid(400);
    let of_year = (153 * ((month as i64 + 9) % 12) + 2) / 5 + day as i64 - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The date of a day number.
fn civil(days: i64) -> (i64, u8, u8) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * of_year + 2) / 153; // 0 is March
    let day = (of_year - (153 * month_index + 2) / 5 + 1) as u8;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 } as u8;
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_as_python_does() {
        let clock = Clock::parse("2026-01-02T03:04:05").unwrap();
        for (format, want) in [
            ("%Y-%m-%d", "2026-01-02"),
            ("%d %b %Y", "02 Jan 2026"),
            ("%B %-d, %Y", "January 2, 2026"),
            ("%A %a %j %U%%", ""),
            ("%A %a %j %w %u", "Friday Fri 002 5 5"),
            ("%I:%M %p|%e|%y", "03:04 AM| 2|26"),
            ("%F %T %D", "2026-01-02 03:04:05 01/02/26"),
            ("100%", "100%"),
        ] {
            match clock.strftime(format) {
                Ok(got) => assert_eq!(got, want, "{format}"),
                Err(_) => assert_eq!(want, "", "{format}"),
            }
        }
        assert_eq!(Clock::from_unix(951_782_400).strftime("%F").unwrap(), "2000-02-29");
    }

    #[test]
    fn refuses_what_is_no_time() {
        for text in [
            "",
            "now",
            "2026-13-01",
            "2026-02-30",
            "2026-01-02T25:00",
            "2026-01-02X03:04",
            "２０２６-01-02",
        ] {
            assert_eq!(Clock::parse(text), None, "{text}");
        }
        assert!(Clock::parse("2024-02-29 23:59:59.5Z").is_some());
    }
}
