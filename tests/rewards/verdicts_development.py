"""Gold answers with the right and the wrong answers to each: the part of the verdicts that the rules were made with."""

# ruff: noqa: RUF001

from __future__ import annotations

PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # braces that carry meaning
    "2^{n-1}": (("2^{n - 1}", r"\frac{2^n}{2}", r"{2}^{n-1}"), ("2^n-1", "2^{n}-1", "2^{n+1}", "2^{n}1")),
    r"\sqrt{x+1}": ((r"\sqrt{1+x}", "(x+1)^{1/2}", r"(x+1)^{\frac12}"), (r"\sqrt{x}+1", r"\sqrt x+1", "x+1")),
    r"\frac{1}{23}": ((r"\dfrac{1}{23}", "1/23", r"\frac1{23}"), (r"\frac{12}{3}", r"\frac{1}{2}3", r"\frac123")),
    "e^{2x}": (("e^{x \\cdot 2}", r"\exp(2x)", "(e^x)^2", r"\mathrm{e}^{2x}"), ("e^{2}x", "e^2x", "2e^x")),
    r"0.\overline{12}": ((r"0.\overline{1212}", r"\frac{12}{99}", "4/33", "0.1212..."), (r"0.\overline{1}2", "0.12")),
    r"\binom{1}{23}": (("0",), (r"\binom{12}{3}", r"\binom{123}{}")),
    r"\binom{12}{3}": (("220", r"\dbinom{12}{3}", r"{12 \choose 3}"), (r"\binom{1}{23}", r"\binom{3}{12}", "4")),
    r"\log_{23} x": ((r"\frac{\ln x}{\ln 23}", r"\log_{23}(x)"), (r"\log_2 3x", r"\log_{2}{3x}", r"\log 23x")),
    "a_{n+1}": (("a_{n + 1}", "a_{1+n}"), ("a_n+1", "a_{n}+1", "a_n")),
    "x^{10}": (("x^{5} x^{5}",), ("x^{1}0", "x^1", "10x", "x_{10}")),
    r"\frac{a+b}{c}": (("(a+b)/c", r"\frac{a}{c}+\frac{b}{c}"), (r"\frac{a}{c}+b", "a+b/c", r"a+\frac{b}{c}")),
    r"\frac{1}{2x}": (("1/(2x)", r"\frac{1}{2}x^{-1}"), (r"\frac{1}{2}x", r"\frac12x", "1/2 x")),
    r"\sqrt[3]{5}": (("5^{1/3}", r"\sqrt[3]5"), (r"3\sqrt{5}", r"\sqrt{5}", r"\sqrt{35}", r"\sqrt[5]{3}")),
    "(x+1)(x-2)": (("x^2-x-2", "(x-2)(x+1)", r"(x+1)\cdot(x-2)"), ("x+1(x-2)", "x+1x-2", "(x+1)x-2")),
    "f(x+1)": (("f(1+x)",), ("f(x)+1", "fx+1")),
    r"\overline{AB}": ((r"\overline{A B}", r"\overline {AB}"), (r"\overline{A}B", "AB")),
    r"2^{2^3}": (("2^8", "256"), ("(2^2)^3", "64")),
    "{5}": (("5", "{{5}}"), ("{5}5",)),
    # relations
    "12": (
        ("=12", "= 12", "x = 12", "12.", r"\text{Area}=12", r"|A| = 12", r"12\text{ cm}", "12.0", r"\text{Answer: }12"),
        (
            "> 12", r"\ne 12", r"\to 12", r"\le 12", r"\approx 12", r"\neq 12", r"\geq 12", r"\sim 12", "<12", r"12\ldots",
            "12...", "2 fifths", "5 dozens", "12 factorial", "12 maybe thirteen", "12 halves", "about 12", "12 or so",
            "12 squared", "x > 12", r"x \to 12", "12+", "12-", r"12\pm 1", "12!", "-12", "12 + C", "twelve thousand",
            "12 hundred", "12 ten thousandths", "12:00", "12/", "1 dozen 2", r"\sqrt{12}", "12x", "12'", "12''",
            r"12\text{ or }13", "(12", "12 more", "12 less than x", "12^{}3", "1.2", "12_{5}", "x_{12}",
        ),
    ),
    "x > 3": (("3 < x", r"(3, \infty)", r"x \in (3,\infty)"), ("x < 3", r"x \ge 3", "3", "x = 3", "y > 3", "x > 4")),
    r"x \ne 2": ((r"x\neq 2", r"x \not= 2", r"(-\infty,2)\cup(2,\infty)"), ("x = 2", "2", "x > 2", r"x \ne 3")),
    # primes
    "f(x)": (("f (x)",), ("f'(x)", "f''(x)", "F(x)", "f(y)", r"f^{-1}(x)", "g(x)", "fx")),
    "f'(x)": ((r"f^{\prime}(x)", "f ' (x)", r"f^\prime(x)"), ("f(x)", "f''(x)", r"f^1(x)")),
    "A'": (("A^{\\prime}",), ("A", "A''", "A^T")),
    # named pairs
    "(1,2)": (
        ("x=1,y=2", "x=1, y=2", r"x = 1 \text{ and } y = 2", "(x,y)=(1,2)", r"(x, y) = (1, 2)", "y=2, x=1"),
        ("y=1,x=2", "x=2,y=1", "(x,y)=(2,1)", "(y,x)=(1,2)", r"\{1,2\}", "[1,2]", "1.2", "(1,2,2)"),
    ),
    "(3,-1)": (("y=-1, x=3", r"\left(3,\, -1\right)"), ("x=-1,y=3", "(-1,3)", "y=3, x=-1", "(3,1)")),
    "x=1, y=2": (("y=2, x=1", r"x=1 \text{ and } y=2", "(x,y)=(1,2)", "(1,2)"), ("x=2, y=1", "y=1, x=2", "x=1")),
    "a=4, b=5": (("b=5,a=4", "a = 4 , b = 5"), ("a=5, b=4", "b=4, a=5", "a=4", "a=4, c=5")),
    # bases
    "F_{10}": (("F_{10}", "F_{ 10 }"), ("F", "15", "F_{1}0", "F_1", "F_{16}")),
    "111_2": (("111_{2}", "7", "7_{10}", "111_{\\text{two}}"), ("111_3", "111_{10}", "7_2", "110_2")),
    "7": (("111_2", "7_{10}", "7_{ten}", r"7_{\text{ten}}"), ("111", "7_2", "7_8 + 1", "111_3", "111_{-2}")),
    "1A_{16}": (("1A_{16}", "26", "26_{10}"), ("1A_{17}", "1B_{16}")),
    "2043_5": (("2043_{5}", r"2043_{\text{five}}", "273"), ("2043_6", "2044_5")),
    # units and number words
    "2/5": (("0.4", r"\frac25", r"40\%", "2 fifths"), ("2", "4", "0.04", "5/2", "2 halves")),
    "3": (("3",), ("3 halves", "3 thirds", "3 dozen", r"3\pi", "3 quarters", "3 percent of x", "3i")),
    r"\pi": ((r"\pi\text{ radians}",), (r"\pi\text{ fourths}", r"\pi\text{ halves}", r"\pi\text{ squared}", "3.14")),
    "60": (("60", "5 dozen"), ("5", "6 dozen", "60 dozen")),
    r"10\text{ cm}": (
        ("10", "10 cm", "0.1 m", "100 mm", r"10\ \mathrm{cm}", r"10\,cm"),
        ("10 m", "10 cm^2", r"10\text{ cm}^2", "10 inches", "10 kg", "1 cm"),
    ),
    "7 apples": (("7", "7 apples", r"7\text{ apples}"), ("7 pears", "7 dozen apples", "6 apples", "7 half apples")),
    "4 wombats": (("4", "4 wombats", r"4 \text{ wombats}", "4 wombat"), ("4 quokkas", "4 wombats per day", "5 wombats")),
    "5": (
        (r"5\text{ meters}", "5 m", r"\$5", "5 units", r"5\text{ ways}", "5 people", "\\!5", r"5\;", "+5", r"5^{1}"),
        (
            "5 sixths", "5 tenths", "5 over 2", "5 plus x", "5 choose 2", "5 minus 1", "5 billion",
            "5 mod 7", "5 squared", r"5^\circ\text{ or }6^\circ", "5 cubed", "half of 5", "5 each of 2", "5 double",
            r"5\text{ thousand}", "5 k", "5e1", "5,000", "5.5", "5\\cdot", "5/1/5", "(5, )5",
        ),
    ),
    r"45^\circ": (("45", "45°", r"45\text{ degrees}", r"\angle A = 45^\circ", r"\frac{\pi}{4}"), ("45'", r"45\pi", r"54^\circ")),
    # transposes, letters, indices
    "A": (
        (r"\text{A}", "(A)", "A.", "A)", "(A) 12", "A. 12", r"\textbf{(A)}\ 12", r"\mathrm{(A)}"),
        ("A^T", "A^{-1}", "A'", "a", "B", "A_1", "A or B", "(A) or (B)", "A, B", "2A", r"\overline{A}", "-A", "AA"),
    ),
    "A^T": ((r"A^{T}", r"A^{\top}", r"A^\top", r"A^{\mathrm{T}}"), ("A", "A^{-1}", "AT", "A^t A")),
    "X": (("X",), ("x", "X_1", "Y", "XX")),
    "x": (("x", "(x)", "1x", "x^1"), ("X", "x_1", "-x", "xx", "2x", "x'", r"\vec{x}", r"\dot{x}")),
    "a_1+a_2": (("a_2+a_1", "a_{1}+a_{2}"), ("a_1+a_1", "a1+a3", "2a_1", "a+a")),
    "AB": (("AB", r"\text{AB}"), ("BA", "A", "ab")),
    "ab": (("ba", r"a\cdot b", r"b \times a", "a*b"), ("AB", "a+b", "ac", "a")),
    "abc": (("bca", "cab", r"a \cdot b \cdot c"), ("ab", "abd", "a+b+c")),
    # intervals
    r"[0,\infty)": ((r"[0, +\infty)", r"x \geq 0", r"\left[0,\infty\right)"), (r"[0,\infty]", r"(0,\infty)", r"[0,\infty")),
    "(0,1]": ((r"0 < x \le 1", r"\left(0,1\right]", r"(0, 1.0]"), ("(0,1)", "[0,1]", "[0,1)", r"0 \le x \le 1", "0,1")),
    r"(-\infty, 2]\cup[5,\infty)": (
        (r"[5,\infty)\cup(-\infty,2]", r"x\le 2 \text{ or } x \ge 5"),
        (r"(-\infty,2]\cap[5,\infty)", r"(-\infty,2)\cup[5,\infty)", r"(-\infty,2]", r"[2,5]"),
    ),
    # thousands
    "1,234": (("1234", r"1{,}234", r"1\,234", r"1,\!234", "1 234"), ("1, 234", "1.234", "1,2,3,4", "1,2340", "12,34")),
    "12345678": (("12,345,678", r"12\,345\,678"), ("12,345,67", "1,234,5678", "12, 345, 678")),
    "(1,234)": (("(1, 234)",), ("1234", "(1234)", "(1,2,34)")),
    # complex numbers
    "-1": ((r"e^{i\pi}", r"e^{\pi i}", "i^2", "-1.0", r"\cos\pi"), ("1", "i", r"e^{\pi}", r"e^{i}\pi")),
    "2i": ((r"\sqrt{-4}", "0+2i", r"2\text{i}", r"2\mathrm{i}", "i+i"), ("2", "-2i", r"\sqrt{4}", "i^2", "2j+1")),
    "3+4i": (("4i+3", r"3+4\mathrm{i}", r"(2+i)^2"), ("3-4i", "4+3i", "7i", "(3,4)", "5", "3+4")),
    r"\frac{1+i\sqrt{3}}{2}": ((r"e^{i\pi/3}", r"\frac12+\frac{\sqrt3}{2}i"), (r"e^{-i\pi/3}", r"\frac{1+\sqrt{3}}{2}")),
    # choices
    "A, B, D": ((r"\text{A,B,D}", "A,B,D", r"\text{A, B, D}", "A, B and D", "B, A, D"), ("A, B", "A, B, C", "A,B,D,E", "D")),
    "C": (("(C) 12", "C. 12", r"\text{(C) }12", "C) 12", "C: 12", r"\textbf{(C)}"), ("(D) 12", "C or D", "12", "c", "CD")),
    # repeating decimals
    "1/3": ((r"0.\bar3", r"0.\bar{3}", r"0.\overline{3}", r"0.\dot{3}", "0.333..."), ("0.3", r"0.\bar{4}", r"0.3\bar{0}")),
    r"0.1\overline{6}": (("1/6", r"0.1\bar6", r"0.16\overline{6}"), (r"0.\overline{16}", r"0.1\overline{06}", "0.16")),
    # degrees in functions
    r"\frac12": (
        (r"\cos 60^\circ", r"\cos(60^\circ)", r"\sin 30^\circ", r"\cos\frac{\pi}{3}", r"\dfrac12", r"\tfrac{1}{2}", "1/2"),
        (r"\cos 60", r"\sin 60^\circ", r"\cos 30^\circ", "1/2/2", r"\frac21", "12", r"\frac{1}{2}\%"),
    ),
    # labelled answers
    "90": ((r"\angle ABC=90^\circ", r"\angle ABC = 90", r"\text{Total} = 90", "90."), (r"\angle ABC = 9", "90 = x + 1", "x+1=90")),
    r"\{x \mid x>3\}": (
        (r"\{x \mid x > 3\}", r"\{x : x>3\}", r"x>3", r"(3,\infty)", r"\{x | x > 3\}", r"\{x\in\mathbb{R}\mid x>3\}"),
        (r"\{x \mid x<3\}", r"\{x \mid x \ge 3\}", r"\{3\}", "3", r"\{x, x > 3\}"),
    ),
    # mixed numbers, percent, currency, scientific
    r"2\frac{3}{4}": (("2.75", "11/4", "2 3/4", r"2\tfrac34", r"2\dfrac{3}{4}"), (r"2\cdot\frac34", "23/4", r"\frac{2\cdot3}{4}", "3/2")),
    r"25\%": (("0.25", r"\frac14", "25", "25 percent", "25%"), ("2.5", "0.0025", "2500%", "75%")),
    r"\$1{,}250.50": (("1250.5", r"\$1,250.50", "1250.50 dollars"), ("1250", r"\$125.05", "€1250.50", "1250.50 cents")),
    r"6.02\times 10^{23}": (("6.02e23", r"6.02\cdot10^{23}", r"602 \times 10^{21}"), (r"6.02\times 10^{22}", "6.02")),
    # sets, tuples, matrices
    r"\{1,2,3\}": (("1,2,3", r"\{3,2,1\}", r"\{1, 2, 2, 3\}", "1, 2, 3"), (r"\{1,2\}", "(3,2,1)", "123", r"\{1,2,3,\ldots\}")),
    r"\{1,3,5,\ldots\}": ((r"\{1,3,5,\dots\}", r"\{1, 3, 5, \ldots\}", r"\{1,3,5,...\}"), (r"\{1,3,5\}", r"\{1,3,5,7\}")),
    "1,2,4,8": (("1, 2, 4, 8", r"1,\,2,\,4,\,8"), ("1,2,4", "1248", "1,2,4,8,16", r"1,2,4,8,\ldots")),
    r"\begin{pmatrix}1\\2\end{pmatrix}": (
        (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\left(\begin{array}{c}1\\2\end{array}\right)"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}^T", "1,2"),
    ),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": (
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&\frac{8}{2}\end{pmatrix}"),
        (r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2&3&4\end{pmatrix}", "-2"),
    ),
    # formulas
    "x^2+C": (("C+x^2", "x^2 + C", "x^2+c", "x^2+K"), ("x^2", "x^2+1", "x^2-x", "2x+C")),
    r"\frac{x^3}{3}+C": ((r"\frac13x^3+C", "x^3/3 + C"), (r"\frac{x^3}{3}", r"\frac{x^3}{2}+C", "x^3+C")),
    "y=2x+1": (("2x+1", "y = 1+2x", "2x-y+1=0", "f(x)=2x+1"), ("y=2x-1", "x=2y+1", "y>2x+1", r"y \le 2x+1", "2x")),
    "x^2+y^2=25": (("y^2+x^2=25", "x^2+y^2-25=0", "x^2 + y^2 = 5^2"), ("x^2+y^2=5", "x+y=5", "25", "x^2-y^2=25")),
    r"\sin x\cos x": ((r"\frac12\sin 2x", r"\cos x \sin x", r"\frac{\sin(2x)}{2}"), (r"\sin x + \cos x", r"\sin(x\cos x)", r"\sin 2x")),
    r"\ln 2": ((r"\log_e 2", r"\ln(2)", r"-\ln\frac12"), (r"\log_{10} 2", r"\ln 4", "0.693", r"2\ln")),
    r"\sqrt{2}+\sqrt{3}": ((r"\sqrt3+\sqrt2", r"\sqrt{5+2\sqrt6}"), (r"\sqrt{5}", r"\sqrt{2+\sqrt3}", r"\sqrt{23}", r"\sqrt2\sqrt3")),
    r"\pm\sqrt{2}": ((r"\sqrt2, -\sqrt2", r"\{-\sqrt{2},\sqrt{2}\}", r"x=\pm\sqrt{2}"), (r"\sqrt2", r"-\sqrt2", r"\pm 2")),
    "n!": (("n!", "n (n-1)!"), ("n", "(n-1)!", "n!!", "N!")),
    r"|x|": ((r"\left|x\right|", r"\lvert x\rvert", r"\sqrt{x^2}"), ("x", "-x", "x^2")),
    r"\lfloor x\rfloor": ((r"\left\lfloor x \right\rfloor",), (r"\lceil x\rceil", "x")),
    "3:4": (("3 : 4", "3:4", "6:8", r"3\colon 4"), ("4:3", "34", "3,4")),
    # words
    r"\text{no solution}": (("no solution", r"\text{No solution}", "No solution."), ("solution", "one solution", "0", "no solutions exist except 1")),
    "even": (("Even", r"\text{even}"), ("odd", "not even", "even or odd")),
}
