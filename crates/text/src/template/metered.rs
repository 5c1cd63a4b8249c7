//! A template as a program whose every operation is metered.
//!
//! minijinja has hooks for filters, tests, functions, methods and for what is written, but none for operators, literals,
//! loops and raw text. So its syntax tree is copied, and these become, or go through, filters of our own, before
//! minijinja compiles it. That happens before constants are folded: `"a" * 1000000000` is a filter by then.
//!
//! The tree and the compiler are minijinja's `unstable_machinery`, which is why its version is pinned. Not here: what
//! things cost ([`super::costs`]).

use std::collections::BTreeMap;

use minijinja::machinery::ast::{self, Expr, Spanned, Stmt};
use minijinja::machinery::{CodeGenerator, Instructions, Span, Vm, WhitespaceConfig};
use minijinja::machinery::{make_string_output, parse};
use minijinja::{AutoEscape, Environment, Error, Value};

/// A list or dict literal, or what `*` and `**` spread.
pub(super) const HELD: &str = "held";
/// An operand that is compared.
pub(super) const WEIGHED: &str = "weighed";
/// A macro that is defined; writes nothing.
pub(super) const DEFINED: &str = "defined";
/// What a loop goes over.
pub(super) const LOOPED: &str = "looped";
/// A slice, whole.
pub(super) const SLICED: &str = "sliced";
/// An operand of `~`.
pub(super) const JOINED: &str = "joined";
/// An operand of `+`.
pub(super) const ADDED: &str = "added";
/// `*`, whole.
pub(super) const TIMES: &str = "times";

/// Name and text.
struct Source {
    name: String,
    text: String,
}

struct Compiled<'s> {
    main: Instructions<'s>,
    blocks: BTreeMap<&'s str, Instructions<'s>>,
}

self_cell::self_cell!(
    struct Cell {
        owner: Source,
        #[covariant]
        dependent: Compiled,
    }
);

/// A compiled template.
pub(super) struct Program(Cell);

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Program").field(&self.0.borrow_owner().name).finish()
    }
}

impl Program {
    pub(super) fn new(name: &str, text: String) -> Result<Self, Error> {
        let source = Source { name: name.to_owned(), text };
        let space = WhitespaceConfig {
            keep_trailing_newline: false,
            lstrip_blocks: true,
            trim_blocks: true,
        };
        Cell::try_new(source, |source| {
            let tree = parse(&source.text, &source.name, Default::default(), space)?;
            let mut code = CodeGenerator::new(&source.name, &source.text);
            code.compile_stmt(&stmt(&tree));
            let (main, blocks) = code.finish();
            Ok(Compiled { main, blocks })
        })
        .map(Self)
    }

    pub(super) fn name(&self) -> &str {
        &self.0.borrow_owner().name
    }

    pub(super) fn render(&self, env: &Environment<'static>, root: Value) -> Result<String, Error> {
        let code = self.0.borrow_dependent();
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        Vm::new(env).eval(&code.main, root, &code.blocks, &mut out, AutoEscape::None)?;
        drop(out);
        Ok(text)
    }
}

fn stmts<'s>(list: &[Stmt<'s>]) -> Vec<Stmt<'s>> {
    let mut out = Vec::with_capacity(list.len());
    for one in list {
        let span = match one {
            Stmt::Macro(m) => Some(m.span()),
            Stmt::CallBlock(c) => Some(c.span()),
            _ => None,
        };
        if let Some(span) = span {
            let nothing = constant(Value::from(""), span);
            let expr = through(DEFINED, nothing, vec![], span);
            out.push(Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr }, span)));
        }
        out.push(stmt(one));
    }
    out
}

fn stmt<'s>(of: &Stmt<'s>) -> Stmt<'s> {
    match of {
        Stmt::Template(s) => {
            let children = stmts(&s.children);
            Stmt::Template(Spanned::new(ast::Template { children }, s.span()))
        }
        Stmt::EmitExpr(s) => {
            Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: expr(&s.expr) }, s.span()))
        }
        // Raw text is written past the formatter, a constant is not.
        Stmt::EmitRaw(s) => {
            let raw = constant(Value::from(s.raw), s.span());
            Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: raw }, s.span()))
        }
        Stmt::ForLoop(s) => {
            let loop_ = ast::ForLoop {
                target: target(&s.target),
                iter: through(LOOPED, expr(&s.iter), vec![], s.span()),
                filter_expr: s.filter_expr.as_ref().map(expr),
                recursive: s.recursive,
                body: stmts(&s.body),
                else_body: stmts(&s.else_body),
            };
            Stmt::ForLoop(Spanned::new(loop_, s.span()))
        }
        Stmt::IfCond(s) => {
            let cond = ast::IfCond {
                expr: expr(&s.expr),
                true_body: stmts(&s.true_body),
                false_body: stmts(&s.false_body),
            };
            Stmt::IfCond(Spanned::new(cond, s.span()))
        }
        Stmt::WithBlock(s) => {
            let pair = |(target, value): &(Expr<'s>, Expr<'s>)| (self::target(target), expr(value));
            let assignments = s.assignments.iter().map(pair).collect();
            let with = ast::WithBlock { assignments, body: stmts(&s.body) };
            Stmt::WithBlock(Spanned::new(with, s.span()))
        }
        Stmt::Set(s) => {
            let set = ast::Set { target: target(&s.target), expr: expr(&s.expr) };
            Stmt::Set(Spanned::new(set, s.span()))
        }
        Stmt::SetBlock(s) => {
            let set = ast::SetBlock {
                target: target(&s.target),
                filter: s.filter.as_ref().map(expr),
                body: stmts(&s.body),
            };
            Stmt::SetBlock(Spanned::new(set, s.span()))
        }
        Stmt::AutoEscape(s) => {
            let escape = ast::AutoEscape { enabled: expr(&s.enabled), body: stmts(&s.body) };
            Stmt::AutoEscape(Spanned::new(escape, s.span()))
        }
        Stmt::FilterBlock(s) => {
            let filter = ast::FilterBlock { filter: expr(&s.filter), body: stmts(&s.body) };
            Stmt::FilterBlock(Spanned::new(filter, s.span()))
        }
        Stmt::Block(s) => {
            let block = ast::Block { name: s.name, required: s.required, body: stmts(&s.body) };
            Stmt::Block(Spanned::new(block, s.span()))
        }
        Stmt::Import(s) => {
            let import = ast::Import { expr: expr(&s.expr), name: target(&s.name) };
            Stmt::Import(Spanned::new(import, s.span()))
        }
        Stmt::FromImport(s) => {
            let name = |(name, alias): &(Expr<'s>, Option<Expr<'s>>)| {
                (target(name), alias.as_ref().map(target))
            };
            let names = s.names.iter().map(name).collect();
            let import = ast::FromImport { expr: expr(&s.expr), names };
            Stmt::FromImport(Spanned::new(import, s.span()))
        }
        Stmt::Extends(s) => {
            Stmt::Extends(Spanned::new(ast::Extends { name: expr(&s.name) }, s.span()))
        }
        Stmt::Include(s) => {
            let include = ast::Include { name: expr(&s.name), ignore_missing: s.ignore_missing };
            Stmt::Include(Spanned::new(include, s.span()))
        }
        Stmt::Macro(s) => Stmt::Macro(macro_(s)),
        Stmt::CallBlock(s) => {
            let block = ast::CallBlock { call: call(&s.call), macro_decl: macro_(&s.macro_decl) };
            Stmt::CallBlock(Spanned::new(block, s.span()))
        }
        Stmt::Continue(s) => Stmt::Continue(Spanned::new(ast::Continue, s.span())),
        Stmt::Break(s) => Stmt::Break(Spanned::new(ast::Break, s.span())),
        Stmt::Do(s) => Stmt::Do(Spanned::new(ast::Do { call: call(&s.call) }, s.span())),
    }
}

fn macro_<'s>(of: &Spanned<ast::Macro<'s>>) -> Spanned<ast::Macro<'s>> {
    let copy = ast::Macro {
        name: of.name,
        args: of.args.iter().map(target).collect(),
        defaults: of.defaults.iter().map(expr).collect(),
        body: stmts(&of.body),
    };
    Spanned::new(copy, of.span())
}

fn call<'s>(of: &Spanned<ast::Call<'s>>) -> Spanned<ast::Call<'s>> {
    Spanned::new(ast::Call { expr: expr(&of.expr), args: args(&of.args) }, of.span())
}

fn args<'s>(list: &[ast::CallArg<'s>]) -> Vec<ast::CallArg<'s>> {
    use ast::CallArg::{Kwarg, KwargSplat, Pos, PosSplat};
    let one = |arg: &ast::CallArg<'s>| match arg {
        Pos(value) => Pos(expr(value)),
        Kwarg(name, value) => Kwarg(name, expr(value)),
        PosSplat(value) => PosSplat(through(HELD, expr(value), vec![], value.span())),
        KwargSplat(value) => KwargSplat(through(HELD, expr(value), vec![], value.span())),
    };
    list.iter().map(one).collect()
}

fn constant<'s>(value: Value, span: Span) -> Expr<'s> {
    Expr::Const(Spanned::new(ast::Const { value }, span))
}

/// `value|filter(args)`.
fn through<'s>(name: &'static str, value: Expr<'s>, args: Vec<Expr<'s>>, span: Span) -> Expr<'s> {
    let args = args.into_iter().map(ast::CallArg::Pos).collect();
    Expr::Filter(Spanned::new(ast::Filter { name, expr: Some(value), args }, span))
}

/// What is assigned to: a name, an attribute or a list of them, of which nothing is made.
fn target<'s>(of: &Expr<'s>) -> Expr<'s> {
    match of {
        Expr::List(e) => {
            let items = e.items.iter().map(target).collect();
            Expr::List(Spanned::new(ast::List { items }, e.span()))
        }
        other => expr(other),
    }
}

fn constant_bytes(of: &Expr<'_>) -> Option<u64> {
    match of {
        Expr::Const(e) => Some(e.value.as_str().map_or(0, |text| text.len() as u64)),
        _ => None,
    }
}

fn binary<'s>(e: &Spanned<ast::BinOp<'s>>) -> Expr<'s> {
    use ast::BinOpKind::{Add, Concat, Eq, Gt, Gte, In, Lt, Lte, Mul, Ne};
    let (mut left, mut right) = (expr(&e.left), expr(&e.right));
    let constants = (constant_bytes(&e.left), constant_bytes(&e.right));
    match e.op {
        Mul => return through(TIMES, left, vec![right], e.span()),
        Add | Concat => {
            let name = if matches!(e.op, Add) { ADDED } else { JOINED };
            let charged = |operand, beside: Option<u64>| {
                let beside = constant(Value::from(beside.unwrap_or(0)), e.span());
                through(name, operand, vec![beside], e.span())
            };
            // Two constants are folded, and are no more than the source; one that stands beside a value is
            // charged with it.
            if constants.0.is_none() {
                left = charged(left, constants.1);
            }
            if constants.1.is_none() {
                right = charged(right, constants.0);
            }
        }
        Eq | Ne | Lt | Lte | Gt | Gte | In => {
            (left, right) = compared(left, right, constants, matches!(e.op, In));
        }
        _ => {}
    }
    Expr::BinOp(Spanned::new(ast::BinOp { op: e.op, left, right }, e.span()))
}

/// Comparing with a constant looks no further than this, but searching for it does.
fn compared<'s>(
    left: Expr<'s>,
    right: Expr<'s>,
    constants: (Option<u64>, Option<u64>),
    searched: bool,
) -> (Expr<'s>, Expr<'s>) {
    let weighed = |operand: Expr<'s>| {
        let span = operand.span();
        through(WEIGHED, operand, vec![], span)
    };
    match constants {
        (_, Some(_)) => (left, right),
        (Some(_), None) if searched => (left, weighed(right)),
        (Some(_), None) => (left, right),
        (None, None) => (weighed(left), weighed(right)),
    }
}

fn comparison<'s>(e: &Spanned<ast::Compare<'s>>) -> Expr<'s> {
    let plain = |of: &Expr<'s>| constant_bytes(of).is_some();
    let one_is_constant = e.ops.len() == 1
        && (plain(&e.ops[0].expr)
            || plain(&e.expr)
                && !matches!(e.ops[0].op, ast::CompareOpKind::In | ast::CompareOpKind::NotIn));
    let operand = |of: &Expr<'s>| {
        if one_is_constant || plain(of) {
            expr(of)
        } else {
            through(WEIGHED, expr(of), vec![], of.span())
        }
    };
    let ops = e.ops.iter().map(|o| ast::CompareOp { op: o.op, expr: operand(&o.expr) }).collect();
    Expr::Compare(Spanned::new(ast::Compare { expr: operand(&e.expr), ops }, e.span()))
}

fn expr<'s>(of: &Expr<'s>) -> Expr<'s> {
    let optional = |of: &Option<Expr<'s>>| of.as_ref().map(expr);
    match of {
        Expr::Var(e) => Expr::Var(Spanned::new(ast::Var { id: e.id }, e.span())),
        Expr::Const(e) => constant(e.value.clone(), e.span()),
        Expr::Slice(e) => {
            let bound = |of: &Option<Expr<'s>>| {
                optional(of).unwrap_or_else(|| constant(Value::from(()), e.span()))
            };
            let bounds = vec![bound(&e.start), bound(&e.stop), bound(&e.step)];
            through(SLICED, expr(&e.expr), bounds, e.span())
        }
        Expr::UnaryOp(e) => {
            #[allow(clippy::needless_match, reason = "the kind is neither Copy nor Clone")]
            let op = match e.op {
                ast::UnaryOpKind::Not => ast::UnaryOpKind::Not,
                ast::UnaryOpKind::Neg => ast::UnaryOpKind::Neg,
            };
            Expr::UnaryOp(Spanned::new(ast::UnaryOp { op, expr: expr(&e.expr) }, e.span()))
        }
        Expr::BinOp(e) => binary(e),
        Expr::Compare(e) => comparison(e),
        Expr::IfExpr(e) => {
            let choice = ast::IfExpr {
                test_expr: expr(&e.test_expr),
                true_expr: expr(&e.true_expr),
                false_expr: optional(&e.false_expr),
            };
            Expr::IfExpr(Spanned::new(choice, e.span()))
        }
        Expr::Filter(e) => {
            let filter = ast::Filter { name: e.name, expr: optional(&e.expr), args: args(&e.args) };
            Expr::Filter(Spanned::new(filter, e.span()))
        }
        Expr::Test(e) => {
            let test = ast::Test { name: e.name, expr: expr(&e.expr), args: args(&e.args) };
            Expr::Test(Spanned::new(test, e.span()))
        }
        Expr::GetAttr(e) => {
            let get = ast::GetAttr { expr: expr(&e.expr), name: e.name };
            Expr::GetAttr(Spanned::new(get, e.span()))
        }
        Expr::GetItem(e) => {
            let subscript_expr = expr(&e.subscript_expr);
            let get = ast::GetItem { expr: expr(&e.expr), subscript_expr };
            Expr::GetItem(Spanned::new(get, e.span()))
        }
        Expr::Call(e) => Expr::Call(call(e)),
        Expr::List(e) => {
            let items = e.items.iter().map(expr).collect();
            let list = Expr::List(Spanned::new(ast::List { items }, e.span()));
            through(HELD, list, vec![], e.span())
        }
        Expr::Map(e) => {
            let keys = e.keys.iter().map(expr).collect();
            let values = e.values.iter().map(expr).collect();
            let map = Expr::Map(Spanned::new(ast::Map { keys, values }, e.span()));
            through(HELD, map, vec![], e.span())
        }
    }
}
